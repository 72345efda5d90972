"""Follower of a run: scores each new checkpoint on SentEval's tasks while the workers continue to train.

A checkpoint is chosen by its scores on dev data; those on test data are shown next to them and decide nothing.

The trainer does not know the follower; it reads the scores from `scores.jsonl` (`src/declutr/common/scores.py`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from declutr.common.cluster import SessionConfig
from declutr.common.lock import LOCK
from declutr.common.scores import ScoreLine, append_score, read_scores, scoring
from declutr.common.storage import hash_json
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import EncoderError
from declutr.evaluation.retrieval.nanobeir import NDCG, NanoError, NanoTest, score_nanobeir
from declutr.evaluation.senteval.data.taskdata import Inspection
from declutr.evaluation.senteval.data.tasks import TASKS
from declutr.evaluation.senteval.runner.harness import evaluate
from declutr.evaluation.senteval.runner.plan import ScoringChoice
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.driver.summary import SUMMARY

FOLDER = "scores"
"""Folder of a run with the tasks' result files."""


class FollowError(ValueError):
    """The requested tasks cannot be scored at every checkpoint."""


@dataclass(frozen=True)
class Follower:
    """Scorer of a run's checkpoints, newest first; a slow machine skips checkpoints instead of falling behind.

    `say` receives progress lines. `tests` of NanoBEIR are shown and choose nothing.
    """

    run: Path
    inspections: Sequence[Inspection]
    choice: ScoringChoice
    device: str
    session: SessionConfig
    say: Callable[[str], None]
    trust_remote_code: bool = False
    tests: Sequence[NanoTest] = ()

    def __post_init__(self) -> None:
        unusable = [inspection for inspection in self.inspections if not inspection.usable]
        if unusable:
            told = "; ".join(f"{inspection.task.label}: {inspection.reason}" for inspection in unusable)
            raise FollowError(f"--follow needs usable data for every task; choose others with --tasks: {told}")
        unfit = [found.task.label for found in self.inspections if not found.task.has_dev]
        if not self.inspections:
            unfit = [one.name for one in self.tests]
        if unfit:
            fit = ", ".join(task.label for task in TASKS if task.has_dev)
            raise FollowError(
                f"--follow scores checkpoints so that one can be chosen, and {', '.join(unfit)} would choose on test "
                f"data: these tasks have no dev data. Name others with --tasks ({fit}); to look at test scores alone, "
                "use `declutr evaluate RUN/checkpoints/STEP`"
            )
        if len(self.choice.protocols) != 1 or not self.inspections:
            raise FollowError("--follow needs tasks of one protocol: --protocol senteval or simcse, --tasks ...")

    @property
    def identity(self) -> str:
        """Hash of tasks, data and settings."""
        files = {found.task.name: dict(found.data.files) for found in self.inspections if found.data}
        return hash_json([self.choice.model_dump(mode="json"), files, *(one.digest for one in self.tests)])

    def follow(self, wait_seconds: float = 10.0, once: bool = False) -> int:
        """Score checkpoints until the run is finished, or `once` those that exist; return the number of new scores."""
        number, passed_over = 0, set[tuple[int, str]]()
        if not (self.run / CHECKPOINTS).is_dir():
            self.say(f"{self.run}: no checkpoints yet{'' if once else '; waiting for them'}")
        while True:
            # Read first: the last checkpoint is older than the summary, and a run that continues holds its lock.
            ended = (self.run / SUMMARY).is_file() and not (self.run / LOCK).exists()
            waiting = [key for key in self.pending() if key not in passed_over]
            if waiting:
                with scoring(self.run, waiting[0][0]):
                    scored = self.score(*waiting[0])
                number += scored
                if not scored:
                    passed_over.add(waiting[0])
            elif once or ended:
                return number
            else:
                time.sleep(wait_seconds)

    def pending(self) -> list[tuple[int, str]]:
        """Steps and checkpoint identities without a score for this choice, newest first."""
        done = {(line.step, line.checkpoint) for line in read_scores(self.run) if line.choice == self.identity}
        found = [(step, state.identity) for step, state in checkpoint.states_in(self.run / CHECKPOINTS)]
        return [key for key in reversed(found) if key not in done]

    def score(self, step: int, identity: str) -> bool:
        """Score one checkpoint and append its line; if it is missing or damaged, report that and return False."""
        begun = time.monotonic()
        try:
            path = checkpoint.checkpoint_path(self.run / CHECKPOINTS, step)
            encoder = load_encoder(str(path), device=self.device, trust_remote_code=self.trust_remote_code)
            found = evaluate(encoder, self.inspections, self.choice, self.run / FOLDER, self.session, self.say)
            nano = score_nanobeir(encoder, self.tests, (), self.say)[encoder.size]
        except (EncoderError, NanoError) as error:
            self.say(f"step {step}: not scored: {error}")
            return False
        (report,) = found.reports.values()
        results = {name: report.results[name] for name in self.choice.tasks if name in report.results}
        tasks = {name: result.dev_headline for name, result in results.items()}
        test = {name: result.headline for name, result in results.items()}
        test |= {name: 100 * float(means[NDCG]) for name, means in nano.items()}
        whole = len(tasks) == len(self.choice.tasks)
        warnings = [*found.warnings, *(text for result in report.results.values() for text in result.warnings)]
        line = ScoreLine(
            step=step,
            checkpoint=identity,
            choice=self.identity,
            score=sum(tasks.values()) / len(tasks) if whole else None,
            tasks=tasks,
            test=test,
            warnings=tuple(dict.fromkeys(warnings)),
            seconds=round(time.monotonic() - begun, 3),
            time=round(time.time(), 3),
        )
        append_score(self.run, line)
        shown = "no score" if line.score is None else f"{line.score:.2f}"
        told = ", ".join(f"{name} {value:.2f}, test {test[name]:.2f}" for name, value in tasks.items())
        self.say(f"step {step}: dev {shown} ({told})")
        return True
