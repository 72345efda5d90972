"""Problems of the paths in the settings of a preparation, named even if other settings are invalid."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from declutr.common.errors import UsageError, refusal
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder, RetryPolicy
from declutr.pipeline.shards.manifest import MANIFEST

_LOOK_SECONDS = 20.0
"""Time for a store to answer before any work; it is not known yet whether the address is right."""


def look(values: Mapping[str, Any]) -> list[str]:
    """Problems of `output`, `corpus.paths` and `tokenizer.name`, one line each."""
    corpus, tokenizer = values.get("corpus"), values.get("tokenizer")
    paths = corpus.get("paths") if isinstance(corpus, Mapping) else None
    listed = paths if isinstance(paths, list) else []  # other types are reported by the validation of the setting
    local = [path for path in listed if isinstance(path, str) and not is_remote(path)]
    problems = [f"corpus.paths: {problem}" for path in local if (problem := _path_problem(path))]
    output = values.get("output")
    if isinstance(output, str):
        setting = values.get("storage_retry_seconds", _LOOK_SECONDS)
        seconds = min(setting, _LOOK_SECONDS) if isinstance(setting, int | float) else _LOOK_SECONDS
        problems += [f"output = {output!r}: {problem}" for problem in output_place_problems(output, listed, seconds)]
    name = tokenizer.get("name") if isinstance(tokenizer, Mapping) else None
    if isinstance(name, str) and looks_like_a_path(name):
        problem = _path_problem(name)
        if problem is None and not expand(name).is_dir():
            problem = f"no such folder; looked at {expand(name).absolute()}"
        problems += [f"tokenizer.name = {name!r}: {problem}"] if problem else []
    return problems


def output_place_problems(
    output: str, inputs: Sequence[Any], storage_retry_seconds: float = _LOOK_SECONDS
) -> list[str]:
    """Reasons why an output cannot take the shards: it cannot be written to, or is inside an input.

    Args:
        output: a folder or an address.
        inputs: paths and addresses of the corpus; other types are ignored.
        storage_retry_seconds: time to retry a request while a store does not answer.
    """
    if is_remote(output):
        return _address_problems(output, [path for path in inputs if isinstance(path, str)], storage_retry_seconds)
    inputs = [path for path in inputs if isinstance(path, str) and not is_remote(path)]
    try:
        folder = expand(output)
    except UsageError as error:
        return [str(error)]
    problems = [
        f"is inside the input {path!r}, so the same command would read the shards as input; name another folder"
        for path in inputs
        if not _path_problem(path)
        and (root := expand(path)).is_dir()
        and folder.resolve().is_relative_to(root.resolve())
    ]
    finished = (folder / MANIFEST).is_file()  # nothing is written then, so a read-only disk is enough
    problem = None if finished else folder_problem(folder)
    return [*problems, problem] if problem else problems


def _address_problems(output: str, inputs: Sequence[str], storage_retry_seconds: float) -> list[str]:
    """Reasons why an address cannot take the shards; writes and removes a small object there unless it is complete."""
    if refused := refusal(output):
        return [refused]
    here = _bare(output)
    problems = [
        f"is inside the input {path!r}, so the same command would read the shards as input; name another address"
        for path in inputs
        if is_remote(path) and f"{here}/".startswith(f"{_bare(path)}/")
    ]
    if not here.partition("://")[2].partition("/")[2]:
        problems.append("names no folder in the bucket; add one, like s3://BUCKET/openwebtext")
    if problems:
        return problems
    remote, probe = Folder(output, RetryPolicy(storage_retry_seconds)), f".declutr-{secrets.token_hex(4)}"
    try:
        if not remote.is_whole():  # nothing is written to a complete output, so reading it is enough
            remote.put(probe, b"")
            remote.delete(probe)
    except (OSError, NotImplementedError) as error:
        return [f"nothing can be written there: {error}"]
    return []


def _bare(address: str) -> str:
    """An address without options and final slashes."""
    return address.partition("?")[0].rstrip("/")


def _path_problem(path: str) -> str | None:
    try:
        expand(path)
    except UsageError as error:
        return str(error)
    return None
