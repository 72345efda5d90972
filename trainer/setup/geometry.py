"""Span lengths and anchors that the user leaves to the shards."""

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from declutr.common.storage import read_json
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.setup.config import TrainConfig

RESUME_SETTINGS = "resume_settings.json"
"""The file of a run that holds the settings which decide its result."""

_KEYS = ("num_anchors", "max_tokens", "min_tokens")


def with_geometry(config: TrainConfig, run: Path, manifests: Mapping[str, Manifest]) -> TrainConfig:
    """The configuration with the shards' geometry for `spans` without `num_anchors`, `max_tokens` or `min_tokens`.

    A run with a checkpoint keeps the values it started with. Without a manifest the defaults stay. `min_tokens` is at
    most `max_tokens`.

    Args:
        config: of the run.
        run: folder of the run.
        manifests: of the tasks' shards that can be read; "" for the main one.
    """
    if not config.auxiliary_tasks and all(key in config.spans.model_fields_set for key in _KEYS):
        return config
    auxiliary_tasks = {
        name: task.model_copy(
            update={"spans": _spans(config.of_task(name), run, ("auxiliary_tasks", name), manifests.get(name))}
        )
        for name, task in config.auxiliary_tasks.items()
    }
    return config.model_copy(
        update={"spans": _spans(config, run, (), manifests.get("")), "auxiliary_tasks": auxiliary_tasks}
    )


def _spans(config: TrainConfig, run: Path, section: tuple[str, ...], manifest: Manifest | None) -> SpanConfig:
    """The completed spans of a task, whose settings are below `section` in those of the run."""
    missing = [key for key in _KEYS if key not in config.spans.model_fields_set]
    if not missing:
        return config.spans
    began = manifest is None or bool(steps_in(run / CHECKPOINTS))
    values = (_started_with(run, section) if began else {}) or _of_shards(config, manifest)
    update = {key: values[key] for key in missing if key in values}
    if "min_tokens" in update:
        longest = update.get("max_tokens", config.spans.max_tokens)
        update["min_tokens"] = min(update["min_tokens"], longest)
    return config.spans.model_copy(update=update)


def unknown(config: TrainConfig) -> list[str]:
    """Names of the settings that `with_geometry` could not find, as dotted keys; none if rows have no spans."""
    if "documents" not in config.objective.reads:
        return []
    return [f"spans.{key}" for key in _KEYS if key not in config.spans.model_fields_set]


def _started_with(run: Path, section: tuple[str, ...]) -> dict[str, Any]:
    """The spans of the run's settings below `section`; empty where there are none."""
    try:
        spans = reduce(lambda tree, key: tree[key], (*section, "spans"), read_json(run / RESUME_SETTINGS))
        return {key: int(spans[key]) for key in _KEYS}
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: the checks report it
        return {}


def _of_shards(config: TrainConfig, manifest: Manifest | None) -> dict[str, Any]:
    if manifest is None:
        return {}
    # Rows of short texts have no spans: the defaults stay.
    geometry = manifest.geometry if manifest.content.kind == "documents" else config.spans
    return {key: getattr(geometry, key) for key in _KEYS}
