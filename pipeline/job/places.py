"""Problems of the paths in the settings of a preparation, found even if other settings are invalid."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.hub import looks_like_a_path
from common.paths import PathError, expand, folder_problem
from common.stores.address import is_remote
from pipeline.shards.manifest import MANIFEST


def look(values: Mapping[str, Any]) -> list[str]:
    """Problems of `output`, `corpus.paths` and `tokenizer.name`, one line each."""
    corpus, tokenizer = values.get("corpus"), values.get("tokenizer")
    paths = corpus.get("paths") if isinstance(corpus, Mapping) else None
    listed = paths if isinstance(paths, list) else []  # other types are reported by the validation of the setting
    local = [path for path in listed if isinstance(path, str) and not is_remote(path)]
    found = [f"corpus.paths: {problem}" for path in local if (problem := _path_problem(path))]
    output = values.get("output")
    if isinstance(output, str):
        found += [f"output = {output!r}: {problem}" for problem in output_place_problems(output, local)]
    name = tokenizer.get("name") if isinstance(tokenizer, Mapping) else None
    if isinstance(name, str) and looks_like_a_path(name):
        problem = _path_problem(name)
        if problem is None and not expand(name).is_dir():
            problem = f"no such folder; looked at {expand(name).absolute()}"
        found += [f"tokenizer.name = {name!r}: {problem}"] if problem else []
    return found


def output_place_problems(output: str, inputs: list[str]) -> list[str]:
    """Reasons why a folder cannot take the shards: it cannot be created, or is inside an input folder."""
    if is_remote(output):
        return ["is an address; name a folder, then `declutr push FOLDER ADDRESS`"]
    try:
        folder = expand(output)
    except PathError as error:
        return [str(error)]
    found = [
        f"is inside the input {path!r}, so the same command would read the shards as input; name another folder"
        for path in inputs
        if not _path_problem(path) and (root := expand(path)).is_dir() and _inside(folder, root)
    ]
    finished = (folder / MANIFEST).is_file()  # nothing is written then, so a read-only disk is enough
    problem = None if finished else folder_problem(folder)
    return [*found, problem] if problem else found


def _inside(folder: Path, root: Path) -> bool:
    return folder.resolve().is_relative_to(root.resolve())


def _path_problem(path: str) -> str | None:
    try:
        expand(path)
    except PathError as error:
        return str(error)
    return None
