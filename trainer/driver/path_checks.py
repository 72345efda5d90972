"""Checks of the folders that a configuration names, without torch and Ray, before either is loaded."""

from collections.abc import Mapping
from typing import Any

from declutr.common.errors import ShardError, UsageError, suggest
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem
from declutr.common.stores.address import is_remote
from declutr.pipeline.shards.manifest import MANIFEST, load_manifest
from declutr.trainer.metrics.loggers import missing_wandb
from declutr.trainer.objectives.registry import BROKEN, KINDS

_NOT_A_RUN = {MANIFEST: "prepared shards", "state.json": "a checkpoint", "modules.json": "an encoder"}


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


def _run_problem(name: str) -> str | None:
    folder = expand(name)
    for file, what in _NOT_A_RUN.items():
        if (folder / file).is_file():
            return f"holds {what}; name another folder"
    return folder_problem(folder)


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
