"""Best weights of a run by its `validation.score`, and early stopping. No Ray.

Every decision follows from files, so a resumed run decides like one that was never stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState
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
