"""Which checkpoints are kept, and why: the last ones, the best, milestones, one being scored. The rest is deleted."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoints import checkpoint
from trainer.checkpoints.ranking import being_scored, rating
from trainer.checkpoints.settings import CheckpointConfig


def kept(
    scores: Mapping[int, float | None], config: CheckpointConfig, scoring: int | None = None
) -> dict[int, list[str]]:
    """The steps to keep, each with its reasons (`last`, `best`, `every`, `scoring`), in order.

    Args:
        scores: the score of every whole checkpoint by its step; None where it was not validated, or not scored yet.
        config: how many.
        scoring: step of the checkpoint that a follower is at. What waits for it is not kept: it takes the newest.
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
    """Deletes what need not be kept, what is broken, and what killed writers left behind.

    Later checkpoints than `newest` were passed over when the run began: they count for nothing, or the newest whole one
    would give way to them. They stay until the run has come by their steps, unless they are broken to the eye.

    Args:
        folder: of the run's checkpoints.
        config: what is kept.
        score: `validation.score`, by which the best is chosen.
        newest: step of the checkpoint that was written last and verified.

    Raises:
        OSError: a storage that does not answer; the checkpoints to keep are as they were.
    """
    rate, scoring = rating(folder, score), being_scored(folder, score)
    scores: dict[int, float | None] = {}
    stay: set[int] = set()
    for step in checkpoint.steps_in(folder):
        try:
            state = checkpoint.read_state(checkpoint.checkpoint_path(folder, step), verify=False)
        except checkpoint.UnreadableError:  # the next time
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
    clear_asides(folder)


def clear_asides(folder: Path) -> None:
    """Removes half-written checkpoints of writers that were killed; only while nobody writes."""
    for path in folder.glob(".step-*.tmp"):
        shutil.rmtree(path)
