"""Retention of checkpoints: keeps the last ones, the best and milestones; deletes the others."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from declutr.common.errors import CheckpointError, UnreadableError
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.config import CheckpointConfig


def kept(scores: Mapping[int, float | None], config: CheckpointConfig) -> dict[int, list[str]]:
    """Steps to keep, each with its reasons (`last`, `best`, `every`), in order.

    Args:
        scores: score of every whole checkpoint by step; None if it was not validated.
        config: which checkpoints are kept.
    """
    reasons: dict[int, list[str]] = {step: [] for step in sorted(scores)}
    for step in sorted(scores)[-config.keep_last :]:
        reasons[step].append("last")
    scored = [(score, -step) for step, score in scores.items() if score is not None]
    if scored:
        reasons[-max(scored)[1]].append("best")  # the earliest of equals, as for the export
    if config.keep_every_steps is not None:
        for step in reasons:
            if step % config.keep_every_steps == 0:
                reasons[step].append("every")
    return {step: why for step, why in reasons.items() if why}


def prune(folder: Path, config: CheckpointConfig, score: str, newest: int) -> None:
    """Deletes checkpoints that are not kept or are broken.

    `newest` is the step of the newest checkpoint that this run has written. Later ones were skipped as broken when the
    run started. They do not count, because they would displace the newest whole one. They stay until the run reaches
    their steps, unless their state shows the damage.

    Raises:
        OSError: the storage does not answer; the checkpoints to keep are unchanged.
    """
    scores: dict[int, float | None] = {}
    stay: set[int] = set()
    for step in checkpoint.steps_in(folder):
        try:
            state = checkpoint.read_state(checkpoint.checkpoint_path(folder, step), verify=False)
        except UnreadableError:  # decide at the next call
            stay.add(step)
        except CheckpointError:
            continue
        else:
            if step > newest:
                stay.add(step)
            else:
                scores[step] = state.scores.get(score)
    stay |= kept(scores, config).keys()
    for step in checkpoint.steps_in(folder):
        if step not in stay:
            checkpoint.discard(checkpoint.checkpoint_path(folder, step))


def sweep(folder: Path) -> None:
    """Deletes what killed writers left half-written; no other writer runs now.

    Raises:
        OSError: the storage does not answer.
    """
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
