"""Checks of the folders that a configuration names, without torch and Ray, before either is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from declutr.common.errors import ShardError, UsageError, suggest
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem
from declutr.common.stores.address import is_remote
from declutr.pipeline.shards.manifest import MANIFEST, load_manifest
from declutr.trainer.metrics.loggers import missing_wandb
from declutr.trainer.objectives.registry import BROKEN, KINDS

_NOT_A_RUN = {MANIFEST: "prepared shards", "state.json": "a checkpoint", "modules.json": "an encoder"}
# Files and folders that a run writes. A folder in place of a file, or the reverse, would end it hours later.
_FILES = (
    "config.yaml", "resume_settings.json", "device.json", "failures.log", "lock.json", "metrics.jsonl",
    "seconds.json", "summary.json", "wandb.json", "export/declutr.json",
)  # fmt: skip
_FOLDERS = ("checkpoints", "export", "tensorboard", "tokenizer", "wandb")


def place_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems of `run`, `data` and `objective.kind` of all tasks, and `encoder.pretrained`, one line each.

    A line starts with the key. The other settings may be invalid.
    """
    auxiliary = _section(values.get("auxiliary_tasks")).items()
    tasks = {"": values, **{f"auxiliary_tasks.{name}.": task for name, task in auxiliary if isinstance(task, Mapping)}}
    corpora = {prefix: _paths(f"{prefix}data", task.get("data")) for prefix, task in tasks.items()}
    checks = (
        ("run", values.get("run"), _run_problem),
        *((key, value, _data_problem) for paths in corpora.values() for key, value in paths.items()),
        ("encoder.pretrained", _section(values.get("encoder")).get("pretrained"), _model_problem),
    )
    problems = []
    for key, value, problem_of in checks:
        if isinstance(value, str) and not is_remote(value):
            try:
                problem = problem_of(value)
            except UsageError as error:
                problem = str(error)
            problems += [f"{key} = {value}: {problem}"] if problem else []
    mode = _section(_section(values.get("metrics")).get("wandb")).get("mode")
    if mode in ("offline", "online") and (missing := missing_wandb(mode)):
        problems.append(missing)
    run = values.get("run")
    problems += [
        f"run = {run}: is the folder of the shards too (data = {path}); name another folder"
        for path in corpora[""].values()
        if isinstance(run, str) and _resolved(path) == _resolved(run) is not None
    ]
    for paths in corpora.values():
        first = dict[str | Path, str]()
        for key, path in paths.items():
            place = _resolved(path)
            if place in first:
                problems.append(
                    f"{key} = {path}: is the same corpus as {first[place]}; name it once, with the sum of the weights"
                )
            elif place is not None:
                first[place] = key
    for prefix, task in tasks.items():
        kind = _section(task.get("objective")).get("kind")
        # One that looks mistyped is reported elsewhere.
        if isinstance(kind, str) and not (kind in KINDS or kind in BROKEN or suggest(kind, list(KINDS))):
            problems.append(
                f"{prefix}objective {kind}: no package installed here defines it; install its package, on all hosts of "
                "the run"
            )
    return problems


def _section(value: Any) -> Mapping[str, Any]:
    """A section of the settings; empty if it is none, which the validation of the setting reports."""
    return value if isinstance(value, Mapping) else {}


def _paths(setting: str, data: Any) -> dict[str, Any]:
    """The places of a setting `data`, which may be invalid, by their keys."""
    if not isinstance(data, list):
        return {setting: data}
    return {f"{setting}.{number}.path": _section(corpus).get("path") for number, corpus in enumerate(data)}


def _resolved(path: Any) -> str | Path | None:
    """An address, or a folder without links; None of what is no path."""
    try:
        return None if not isinstance(path, str) else path if is_remote(path) else expand(path).resolve()
    except UsageError:  # reported already
        return None


def _run_problem(name: str) -> str | None:
    folder = expand(name)
    for file, what in _NOT_A_RUN.items():
        if (folder / file).is_file():
            return f"holds {what}; name another folder"
    return folder_problem(folder) or _kind_problem(folder)


def _kind_problem(run: Path) -> str | None:
    """A problem if a name that a run writes is an entry of the wrong kind."""
    for name in _FILES:
        if (run / name).is_dir():
            return f"contains the folder {name}, but a run writes a file there; move it elsewhere"
    for name in _FOLDERS:
        if (run / name).is_symlink() and not (run / name).exists():
            return f"contains the broken link {name}, but a run writes a folder there; remove the link"
        if (run / name).exists() and not (run / name).is_dir():
            return f"contains the file {name}, but a run writes a folder there; move it elsewhere"
    return None


def _data_problem(name: str) -> str | None:
    folder = expand(name)
    if folder.exists() and not folder.is_dir():
        return "is a file; name the folder of the shards, the `output` of `prepare`"
    try:
        load_manifest(folder)
    except (ShardError, OSError) as error:
        return str(error)
    return None


def _model_problem(name: str) -> str | None:
    if looks_like_a_path(name) and not expand(name).is_dir():
        return f"no such folder; looked at {expand(name).absolute()}"
    return None
