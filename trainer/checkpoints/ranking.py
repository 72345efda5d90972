"""Best weights of a run by its `validation.score`, and early stopping. No Ray.

The score is one that the workers measure on held-out documents, or `followed`: the score that a process alongside the
run gives its checkpoints (src/declutr/common/scores.py). Every decision follows from files, so a resumed run decides like one that
was never stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from declutr.common.console.logs import get_logger
from declutr.common.scores import comparable, read_scores, read_scoring
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CheckpointError
from declutr.trainer.checkpoints.state import RunState, read_origin
from declutr.trainer.metrics.config import FOLLOWED
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.parallel.request import Request


def rating(folder: Path, score: str) -> Callable[[RunState], float | None]:
    """A function from a checkpoint's state to its score, or None if it is not known yet; higher is better.

    `folder` is that of the run's checkpoints; a follower writes next to it.
    """
    if score != FOLLOWED:
        return lambda state: state.scores.get(score)
    given = comparable(read_scores(folder.parent))
    return lambda state: given.get((state.step, state.identity))


def being_scored(folder: Path, score: str) -> int | None:
    """Step of the checkpoint that a follower is scoring, which may become the best; None if there is none."""
    return read_scoring(folder.parent) if score == FOLLOWED else None


def find_best(folder: Path, score: str) -> tuple[Path, RunState] | None:
    """Finds the checkpoint with the highest score among those that verify; the earliest of equal scores."""
    best: tuple[float, Path, RunState] | None = None
    rate = rating(folder, score)
    for step in checkpoint.steps_in(folder):
        path = checkpoint.checkpoint_path(folder, step)
        try:
            state = checkpoint.read_state(path)
        except CheckpointError as error:
            get_logger().warning("skipping a broken checkpoint: %s", error)
            continue
        value = rate(state)
        if value is not None and (best is None or value > best[0]):
            best = value, path, state
    return None if best is None else best[1:]


def unscored(folder: Path, score: str) -> list[int]:
    """Steps of the checkpoints without this score."""
    rate = rating(folder, score)
    return [step for step, state in checkpoint.states_in(folder) if rate(state) is None]


def history(run: Path, score: str, step: int) -> dict[int, float]:
    """Scores of a run by step, up to `step`, including those of deleted checkpoints; later steps will be repeated.

    The weights before the first step have no checkpoint and do not count. Nor do scores copied by a fork, because its
    settings may have changed their meaning.

    Raises:
        DamagedError: `fork.json` is not what a fork writes.
    """
    if score == FOLLOWED:  # of weights that were made twice, the last score counts
        found = {at: value for (at, _), value in comparable(read_scores(run)).items() if at <= step}
    else:
        first = origin.step if (origin := read_origin(run)) else 0
        lines = [line for line in read_metrics(run) if line["kind"] == "validation" and first < line["step"] <= step]
        found = {line["step"]: line[score] for line in lines if line.get(score) is not None}
    return dict(sorted(found.items()))


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
        name = "the follower's score" if score == FOLLOWED else score
        return (
            f"{name} was best after step {self.step} ({self.score:.4g}), and none of the {self.since} scores "
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

    def saved(self, step: int) -> None:
        """Reads a follower's new scores after a checkpoint was written. May be called from another thread."""
        if self._score == FOLLOWED:
            try:
                self.resume(step)
            except OSError as error:  # no reason to write the checkpoint again
                get_logger().warning("cannot read the follower's scores now (%s)", error.strerror)

    def _judge(self, scores: dict[int, float]) -> None:
        self._scores = scores
        now, patience = BestScore.of(scores), self._patience
        spent = patience is not None and now is not None and now.since >= patience
        self.request = Request.EARLY if spent else Request(0)
