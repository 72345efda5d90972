"""Checks of the folders that a configuration names, without torch and Ray, before either is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from declutr.common.errors import ShardError, UsageError
from declutr.common.hub import looks_like_a_path
from declutr.common.paths import expand, folder_problem
from declutr.common.stores.address import is_remote
from declutr.common.suggestions import suggest
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
    encoder, auxiliary = values.get("encoder"), values.get("auxiliary_tasks")
    pretrained = encoder.get("pretrained") if isinstance(encoder, Mapping) else None
    tasks = (
        {f"auxiliary_tasks.{name}.": one for name, one in auxiliary.items()} if isinstance(auxiliary, Mapping) else {}
    )
    tasks = {prefix: one for prefix, one in tasks.items() if isinstance(one, Mapping)}
    data = {"data": values.get("data"), **{f"{prefix}data": one.get("data") for prefix, one in tasks.items()}}
    corpora = {setting: _paths(setting, value) for setting, value in data.items()}
    checks = (
        ("run", values.get("run"), _run_problem),
        *((key, value, _data_problem) for paths in corpora.values() for key, value in paths.items()),
        ("encoder.pretrained", pretrained, _model_problem),
    )
    found = []
    for key, value, problem_of in checks:
        if isinstance(value, str) and not is_remote(value):
            try:
                problem = problem_of(value)
            except UsageError as error:
                problem = str(error)
            found += [f"{key} = {value}: {problem}"] if problem else []
    found += _logger_problem(values.get("metrics"))
    found += [line for value in corpora["data"].values() for line in _same_problem(values.get("run"), value)]
    found += [line for paths in corpora.values() for line in _twice(paths)]
    found += _objective_problem(values.get("objective"))
    return found + [prefix + line for prefix, one in tasks.items() for line in _objective_problem(one.get("objective"))]


def _logger_problem(metrics: Any) -> list[str]:
    """A problem if Weights & Biases is wanted and not installed here."""
    wandb = metrics.get("wandb") if isinstance(metrics, Mapping) else None
    mode = wandb.get("mode") if isinstance(wandb, Mapping) else None
    problem = missing_wandb(mode) if mode in ("offline", "online") else None
    return [problem] if problem else []


def _paths(setting: str, data: Any) -> dict[str, Any]:
    """The places of a setting `data`, which may be invalid, by their keys."""
    if not isinstance(data, list):
        return {setting: data}
    several = [one.get("path") if isinstance(one, Mapping) else None for one in data]
    return {f"{setting}.{number}.path": path for number, path in enumerate(several)}


def _twice(paths: Mapping[str, Any]) -> list[str]:
    """A problem for each corpus that an earlier one names too."""
    first, found = dict[Any, str](), []
    for key, path in paths.items():
        if not isinstance(path, str):
            continue
        try:
            place = path if is_remote(path) else expand(path).resolve()
        except UsageError:  # reported already
            continue
        if place in first:
            found.append(
                f"{key} = {path}: is the same corpus as {first[place]}; name it once, with the sum of the weights"
            )
        first.setdefault(place, key)
    return found


def _objective_problem(objective: Any) -> list[str]:
    """A problem if no package defines the objective, unless its name looks mistyped, which is reported elsewhere."""
    kind = objective.get("kind") if isinstance(objective, Mapping) else None
    if not isinstance(kind, str) or kind in KINDS or kind in BROKEN or suggest(kind, list(KINDS)):
        return []
    return [f"objective {kind}: no package installed here defines it; install its package, on all hosts of the run"]


def _same_problem(run: Any, data: Any) -> list[str]:
    """A problem if `run` and `data` are the same folder."""
    if not isinstance(run, str) or not isinstance(data, str):
        return []
    try:
        same = run == data or (not is_remote(run + data) and expand(run).resolve() == expand(data).resolve())
    except UsageError:  # reported already
        return []
    return [f"run = {run}: is the folder of the shards too (data = {data}); name another folder"] if same else []


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
