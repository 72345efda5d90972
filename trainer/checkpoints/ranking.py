"""Best weights of a run by its `validation.score`, and early stopping. No Ray.

Every decision follows from files, so a resumed run decides like one that was never stopped.
"""

from collections.abc import Mapping
from pathlib import Path

from declutr.common.errors import CheckpointError, UnreadableError
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import CheckpointConfig, RunState
from declutr.trainer.metrics.metrics import read_metrics


def history(run: Path, score: str, step: int) -> dict[int, float]:
    """Scores of a run by step, up to `step`, including those of deleted checkpoints; later steps will be repeated.

    The weights before the first step have no checkpoint and do not count.
    """
    lines = [line for line in read_metrics(run) if line["kind"] == "validation" and 0 < line["step"] <= step]
    return dict(sorted((line["step"], line[score]) for line in lines if line.get(score) is not None))


def from_best(scores: Mapping[int, float]) -> list[int]:
    """Steps in the order of their scores, best first; of equal scores the earliest first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


def find_best(folder: Path, score: str) -> tuple[Path, RunState] | None:
    """Finds the checkpoint with the highest score among those that verify; the earliest of equal scores.

    Logs each one that it skips, because it may have been the best.
    """
    states = checkpoint.states_in(folder, warn=True)
    scores = {step: state.scores[score] for step, state in states if score in state.scores}
    return checkpoint.first_whole(folder, from_best(scores))


def early_end(scores: Mapping[int, float], score: str, patience: int | None) -> str | None:
    """The reason why a run with these scores by step ends early; None: it goes on, as always without a patience.

    Args:
        scores: held-out scores by step.
        score: `validation.score`.
        patience: `validation.patience`.
    """
    if patience is None or not scores:
        return None
    best = from_best(scores)[0]
    since = sum(step > best for step in scores)  # `from_best` has the earliest of equals: an equal score is no better
    if since < patience:
        return None
    return (
        f"{score} was best after step {best} ({scores[best]:.4g}), and none of the {since} scores since is better "
        f"(validation.patience = {patience})"
    )


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
        except CheckpointError:  # broken: deleted below
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
