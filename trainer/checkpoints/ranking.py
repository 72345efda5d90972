"""Which weights of a run are the best, by the score that was chosen, and since when. No Ray.

The score is one that the workers measure on held-out documents, or `followed`: what a process alongside the run has
given its checkpoints (common/scores.py). Everything here follows from files, so a run that is
continued decides as one that was never stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.console.logs import get_logger
from common.scores import comparable, read_scores, read_scoring
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CheckpointError
from trainer.checkpoints.state import RunState, read_origin
from trainer.metrics.metrics import read_metrics
from trainer.metrics.settings import FOLLOWED
from trainer.parallel.world import Request


def rating(folder: Path, score: str) -> Callable[[RunState], float | None]:
    """What a checkpoint is worth by a score, as far as it is known now; higher is better.

    Args:
        folder: of the run's checkpoints; a follower writes beside it.
        score: `validation.score`.
    """
    if score != FOLLOWED:
        return lambda state: state.scores.get(score)
    given = comparable(read_scores(folder.parent))
    return lambda state: given.get((state.step, state.identity))


def being_scored(folder: Path, score: str) -> int | None:
    """Step of the checkpoint that a follower is at: it may turn out to be the best. None: there is none."""
    return read_scoring(folder.parent) if score == FOLLOWED else None


def find_best(folder: Path, score: str) -> tuple[Path, RunState] | None:
    """The checkpoint that verifies with the highest value of a score; the earliest of equals."""
    best: tuple[float, Path, RunState] | None = None
    rate = rating(folder, score)
    for step in checkpoint.steps_in(folder):
        path = checkpoint.checkpoint_path(folder, step)
        try:
            state = checkpoint.read_state(path)
        except CheckpointError as error:
            get_logger().warning("passing over a broken checkpoint: %s", error)
            continue
        value = rate(state)
        if value is not None and (best is None or value > best[0]):
            best = value, path, state
    return None if best is None else best[1:]


def unscored(folder: Path, score: str) -> list[int]:
    """Steps of the checkpoints that have no value of a score (yet)."""
    rate = rating(folder, score)
    return [step for step, state in checkpoint.states_in(folder) if rate(state) is None]


def history(run: Path, score: str, step: int) -> dict[int, float]:
    """The scores of a run's weights by step, up to one; those of checkpoints that are gone are among them.

    Weights before the first step have no checkpoint and do not count, nor do scores that a fork has brought along:
    its settings may have changed what they mean.

    Args:
        run: its folder.
        score: `validation.score`.
        step: later scores belong to steps that will be taken again.

    Raises:
        DamagedError: `fork.json` is not what a fork writes.
    """
    if score == FOLLOWED:  # of weights that were made twice, those that were scored last
        found = {at: value for (at, _), value in comparable(read_scores(run)).items() if at <= step}
    else:
        begun = origin.step if (origin := read_origin(run)) else 0
        lines = [line for line in read_metrics(run) if line["kind"] == "validation" and begun < line["step"] <= step]
        found = {line["step"]: line[score] for line in lines if line.get(score) is not None}
    return dict(sorted(found.items()))


def from_best(scores: Mapping[int, float]) -> list[int]:
    """Steps from the best score down; of equals the earliest first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


@dataclass(frozen=True)
class BestScore:
    """Where the best score lies.

    Attributes:
        step: of the weights with the best score; the earliest of equals.
        score: the best.
        since: how many scores of later steps there are, none of them better.
    """

    step: int
    score: float
    since: int

    @staticmethod
    def of(scores: Mapping[int, float]) -> "BestScore | None":
        """Of scores by step; None where there are none."""
        if not scores:
            return None
        step = from_best(scores)[0]
        return BestScore(step, scores[step], sum(at > step for at in scores))

    def reason(self, score: str, patience: int | None) -> str:
        """A sentence on why a run has ended early.

        Args:
            score: `validation.score`.
            patience: `validation.patience`.
        """
        name = "the follower's score" if score == FOLLOWED else score
        return (
            f"{name} was best after step {self.step} ({self.score:.4g}), and none of the {self.since} scores "
            f"since is better (validation.patience = {patience})"
        )


class EarlyStopping:
    """Ends the run when its scores no longer improve. Only the first worker's instance receives scores.

    Args:
        run: folder of the run.
        score: `validation.score`.
        patience: `validation.patience`; None: the run is never ended early.

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
