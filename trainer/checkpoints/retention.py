"""Retention of checkpoints: keeps the last ones, the best, milestones and one being scored; deletes the others."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.config import CheckpointConfig
from declutr.trainer.checkpoints.ranking import being_scored, rating


def kept(
    scores: Mapping[int, float | None], config: CheckpointConfig, scoring: int | None = None
) -> dict[int, list[str]]:
    """Steps to keep, each with its reasons (`last`, `best`, `every`, `scoring`), in order.

    Args:
        scores: score of every whole checkpoint by step; None if it was not validated or not scored yet.
        config: which checkpoints are kept.
        scoring: step of the checkpoint that a follower is scoring. Unscored checkpoints are not kept for it, because it
            takes the newest.
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
    if scoring in reasons:
        reasons[scoring].append("scoring")
    return {step: why for step, why in reasons.items() if why}


def prune(folder: Path, config: CheckpointConfig, score: str, newest: int) -> None:
    """Deletes checkpoints that are not kept or are broken.

    `newest` is the step of the newest checkpoint that this run has written. Later ones were skipped as broken when the
    run started. They do not count, because they would displace the newest whole one. They stay until the run reaches
    their steps, unless their state shows the damage.

    Raises:
        OSError: the storage does not answer; the checkpoints to keep are unchanged.
    """
    scoring = being_scored(folder, score)  # first: a follower writes the score, and then removes its mark
    rate = rating(folder, score)
    scores: dict[int, float | None] = {}
    stay: set[int] = set()
    for step in checkpoint.steps_in(folder):
        try:
            state = checkpoint.read_state(checkpoint.checkpoint_path(folder, step), verify=False)
        except checkpoint.UnreadableError:  # decide at the next call
            stay.add(step)
        except checkpoint.CheckpointError:
            continue
        else:
            if step > newest:
                stay.add(step)
            else:
                scores[step] = rate(state)
    stay |= kept(scores, config, scoring).keys()
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
