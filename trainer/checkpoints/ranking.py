"""Best weights of a run by its `validation.score`, and early stopping. No Ray.

Every decision follows from files, so a resumed run decides like one that was never stopped.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError, UnreadableError
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import CheckpointConfig, RunState
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.parallel.request import Request


def find_best(folder: Path, score: str) -> tuple[Path, RunState] | None:
    """Finds the checkpoint with the highest score among those that verify; the earliest of equal scores."""
    best: tuple[float, Path, RunState] | None = None
    for step in checkpoint.steps_in(folder):
        path = checkpoint.checkpoint_path(folder, step)
        try:
            state = checkpoint.read_state(path)
        except CheckpointError as error:
            get_logger().warning("skipping a broken checkpoint: %s", error)
            continue
        value = state.scores.get(score)
        if value is not None and (best is None or value > best[0]):
            best = value, path, state
    return None if best is None else best[1:]


def history(run: Path, score: str, step: int) -> dict[int, float]:
    """Scores of a run by step, up to `step`, including those of deleted checkpoints; later steps will be repeated.

    The weights before the first step have no checkpoint and do not count.
    """
    lines = [line for line in read_metrics(run) if line["kind"] == "validation" and 0 < line["step"] <= step]
    return dict(sorted((line["step"], line[score]) for line in lines if line.get(score) is not None))


def from_best(scores: Mapping[int, float]) -> list[int]:
    """Steps in the order of their scores, best first; of equal scores the earliest first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


@dataclass(frozen=True)
class BestScore:
    """The best score of a run.

    Attributes:
        step: step with the best score; the earliest of equal scores.
        score: the best score.
        since: number of scores of later steps, none of them better.
    """

    step: int
    score: float
    since: int

    @staticmethod
    def of(scores: Mapping[int, float]) -> "BestScore | None":
        """The best of scores by step; None without scores."""
        if not scores:
            return None
        step = from_best(scores)[0]
        return BestScore(step, scores[step], sum(at > step for at in scores))

    def reason(self, score: str, patience: int | None) -> str:
        """A sentence on why a run has ended early, with its `validation.score` and `validation.patience`."""
        return (
            f"{score} was best after step {self.step} ({self.score:.4g}), and none of the {self.since} scores "
            f"since is better (validation.patience = {patience})"
        )


class EarlyStopping:
    """Ends the run when its scores no longer improve. Only the first worker's instance receives scores.

    Without a patience the run never stops early.

    Attributes:
        request: EARLY when the run is to end.
    """

    def __init__(self, run: Path, score: str, patience: int | None) -> None:
        self.request = Request(0)
        self._run, self._score, self._patience = run, score, patience
        self._scores: dict[int, float] = {}

    def resume(self, step: int) -> None:
        """Reads the scores up to a step from the run's files."""
        if self._patience is not None:
            self._judge(history(self._run, self._score, step))

    def measured(self, step: int, scores: Mapping[str, float]) -> None:
        """Adds the held-out scores of a step."""
        if self._score in scores and step:
            self._judge({**self._scores, step: scores[self._score]})

    def _judge(self, scores: dict[int, float]) -> None:
        self._scores = scores
        now, patience = BestScore.of(scores), self._patience
        spent = patience is not None and now is not None and now.since >= patience
        self.request = Request.EARLY if spent else Request(0)


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
