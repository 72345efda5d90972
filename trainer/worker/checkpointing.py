"""A worker's part in checkpoints. The first worker chooses and writes them; all take part in the collectives."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from declutr.common.bootstrap import F64
from declutr.common.console.logs import get_logger
from declutr.common.errors import SaveError
from declutr.common.stores.address import child
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.saver import Saver
from declutr.trainer.checkpoints.state import Reported, RunState
from declutr.trainer.checkpoints.store import store_of
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.config import TrainConfig
from declutr.trainer.metrics.metrics import METRICS, read_last_step
from declutr.trainer.parallel.communicator import Request
from declutr.trainer.step.step import TrainStep
from declutr.trainer.worker.heartbeat import Heartbeat

if TYPE_CHECKING:  # it imports this file
    from declutr.trainer.worker.entry import Reporter

_NO_ROWS: F64 = np.empty(0)


class Checkpointing:
    """Resumes from checkpoints, saves them, and ends the run for all workers at the same step."""

    def __init__(
        self,
        config: TrainConfig,
        run: Path,
        identity: dict[str, str],  # hashes of settings and data, which the checkpoints of this run have
        hashes: dict[str, str],
        train_steps: Sequence[TrainStep],
        heartbeat: Heartbeat,
        reporter: "Reporter | None" = None,
    ) -> None:
        self.early = False  # true if the run ended before its last step because its scores no longer improved
        self.early_request = Request(0)  # EARLY when the run is to end so; on the first worker only
        self._scores: dict[int, float] = {}  # by step, if there is a patience
        self.saver: Saver | None = None  # of the first worker inside `writing`
        self.at_start = False  # true if no step of the run is done
        self._reported: Reported | None = None
        self._validated = 0  # step of its rows
        self._config, self._run, self._train_steps, self._train_step = config, run, train_steps, train_steps[-1]
        self._heartbeat = heartbeat
        self._reporter = reporter
        self._metrics: dict[int, dict[str, Any]] = {}  # of steps whose checkpoint is not reported yet
        self.identity = identity
        self._task_hashes = hashes if config.auxiliary_tasks else {}

    def resume(self) -> int:
        """Loads the newest complete checkpoint of this run, if any; returns the steps done. Rank 0 chooses for all."""
        folder, train_step = self._run / CHECKPOINTS, self._train_step
        first = train_step.comm.rank == 0
        latest = checkpoint.find_latest(folder, self.identity) if first else None
        done = train_step.comm.all_reduce_max(0 if latest is None else latest[1].step)
        if done:
            path = checkpoint.checkpoint_path(folder, done)
            state = checkpoint.read_state(path) if latest is None else latest[1]
            load(path, self._train_steps)
            counts = {"": (state.skipped, state.skipped_in_a_row), **state.tasks_skipped}
            for update in self._train_steps:
                update.nonfinite_losses.skipped, update.nonfinite_losses.in_a_row = counts.get(update.name, (0, 0))
            self._reported, self._validated = state.reported, done
        self.at_start = done == 0
        if first:
            if self._config.validation.patience is not None:
                # the scores of a quiet run, so that this one ends at the same step
                self._judge(checkpoint.history(self._run, self._config.validation.score, done))
            line = read_last_step(self._run / METRICS)
            last_step = 0 if line is None else line["step"]
            if done or last_step:
                repeated = f"; repeating steps {done + 1} to {last_step}" if last_step > done else ""
                get_logger().info("continuing after step %d%s", done, repeated)
        return done

    def ended(self, done: int) -> bool:
        """True if the run already ended early; checked before any further step."""
        if done < self._train_step.total_steps:
            self.early = Request.EARLY in self._train_step.comm.all_reduce_or(self.early_request)
        return self.early

    @contextlib.contextmanager
    def writing(self, before: Callable[[], None]) -> Iterator[None]:
        """Runs the first worker's saver; `before` writes the metrics of a checkpoint's steps, which a resume needs."""
        if self._train_step.comm.rank:
            yield
            return
        config = self._config
        score = config.validation.score
        store = store_of(config.run, self._run, retry_seconds=0.0)  # the saver retries
        after = None if store is None else partial(store.save, config.checkpoint, score)
        saving = config.checkpoint.in_steps(self._train_step.total_steps)
        self.saver = Saver(self._run / CHECKPOINTS, saving, score, before=before, after=after)
        try:
            yield
        finally:
            self.saver.close()

    def scored(
        self,
        step: int,  # step that was validated
        scores: dict[str, float],  # the held-out scores
        name: str = "",  # the score that is reported; "" for none
        rows: F64 = _NO_ROWS,  # values of its reporting rows
    ) -> None:
        """Passes held-out scores to early stopping, and the values of the reporting rows to the next checkpoint."""
        start = [] if self._reported is None else self._reported.start
        if step == 0:
            start = rows.tolist()
        elif self._train_step.comm.rank == 0 and (value := scores.get(self._config.validation.score)) is not None:
            self._judge({**self._scores, step: value})
        self._reported = Reported(score=name, start=start, rows=rows.tolist()) if name else None
        self._validated = step

    def _judge(self, scores: dict[int, float]) -> None:
        """Requests the end of the run if its scores by step no longer improve."""
        self._scores, validation = scores, self._config.validation
        ended = checkpoint.early_end(scores, validation.score, validation.patience)
        self.early_request = Request.EARLY if ended else Request(0)

    def requests(self, step: int, scores: dict[str, float], stop: bool) -> Request:
        """Requests of this worker after a step; the arguments are those of `after_step`."""
        request = self.early_request | (Request.STOP if stop else Request(0))
        # each step that may be chosen is saved
        rated = self._config.chooses and self._config.validation.score in scores
        if self.saver is not None:
            with self._heartbeat.doing("writing"):  # a wait for a slow store is no hang
                request |= Request.SAVE if self.saver.due(step, needed=rated) else Request(0)
            request |= Request.FAIL if self.saver.failed() else Request(0)
            request |= Request.REPORT if self.saver.written in self._metrics else Request(0)
        return request

    def after_step(
        self,
        step: int,  # 1-based step that was just taken
        scores: dict[str, float],  # held-out scores of its weights, if any
        stop: bool,  # true if this worker has a notice to stop
        before_save: Callable[[], None] = lambda: None,  # records the step, if that is pending
        # requests of all workers, if they agreed on them while the step was computed. Scores may change them.
        agreed: Request | None = None,
    ) -> bool:
        """Saves, reports or stops if any worker requests it; returns whether this was the last step."""
        request = Request(0) if agreed is None else agreed
        if agreed is None or scores:  # scores came after the agreement, and may make a checkpoint due
            request |= self._train_step.comm.all_reduce_or(self.requests(step, scores, stop))
        if Request.FAIL in request:
            if self.saver is not None:
                self.saver.check()
            raise SaveError("the first worker can no longer write checkpoints")
        if Request.REPORT in request:
            self._report()
        self.early = Request.EARLY in request
        end = step == self._train_step.total_steps or Request.STOP in request or self.early
        if end or Request.SAVE in request:
            before_save()
            with self._heartbeat.doing("saving"):
                self.save(step, scores)
            if end:
                self._finish()
        return end

    def _finish(self) -> None:
        """Waits until the last checkpoint is written and reported."""
        try:
            if self.saver is not None:
                with self._heartbeat.doing("writing"):
                    self.saver.wait()
        finally:
            self._report()  # also after a failure, because the other workers report too
        if self._reporter is not None:
            with self._heartbeat.doing("reporting"):
                self._reporter.close()

    def _report(self) -> None:
        """Reports the newest written checkpoint, on the first worker; all workers call it."""
        if self._reporter is None:
            return
        step = None if self.saver is None else self.saver.written
        if step is None or step not in self._metrics:
            self._reporter.report({})  # Ray waits for a report of each worker
            return
        self._reporter.report(self._metrics[step], checkpoint.checkpoint_path(Path(), step).name)
        self._metrics = {later: metrics for later, metrics in self._metrics.items() if later > step}

    def save(self, step: int, scores: dict[str, float]) -> None:
        """Copies a checkpoint for the first worker's saver; every worker takes part."""
        train_step, saver, memory = self._train_step, self.saver, None
        try:
            with self._heartbeat.doing("writing"):
                memory = saver.reuse_memory() if saver is not None else None
        except Exception:  # noqa: BLE001 - raised after the next agreement; the other workers copy, and would wait
            saver = None
        contents = collect(self._train_steps, keep=saver is not None, memory=memory)
        if saver is not None:
            if self._reporter is not None:
                line = {name: value for name, value in (self._heartbeat.line or {}).items() if name != "kind"}
                place = child(child(self._config.run, CHECKPOINTS), checkpoint.checkpoint_path(Path(), step).name)
                self._metrics[step] = {**line, **scores, "step": step, "checkpoint": place}
            *auxiliary, (_, main) = [(update.name, update.nonfinite_losses) for update in self._train_steps]
            reported = self._reported
            if reported is not None and self._validated != step:
                reported = reported.model_copy(update={"rows": []})  # they are of earlier weights
            state = RunState(
                reported=reported,
                step=step,
                documents=step * self._config.batch_documents,
                world_size=train_step.comm.size,
                scores=scores,
                files={},
                skipped=main.skipped,
                skipped_in_a_row=main.in_a_row,
                tasks_skipped={name: (losses.skipped, losses.in_a_row) for name, losses in auxiliary if losses.skipped},
                task_hashes=self._task_hashes,
                **self.identity,
            )
            saver.submit(state, contents)
