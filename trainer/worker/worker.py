"""One worker's run: resume, then batch, step, log, validate, save."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.console.logs import get_logger
from pipeline.shards.manifest import data_hash
from pipeline.shards.shards import ShardSet
from trainer.checkpoints import checkpoint
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.checkpoints.ranking import EarlyStopping
from trainer.checkpoints.saver import SaveError, Saver
from trainer.checkpoints.state import RunState
from trainer.checkpoints.store import after_save
from trainer.data.batches import RankBatch
from trainer.data.chunks import rank_plan
from trainer.data.plan import Plan
from trainer.data.stream import Ahead, batches
from trainer.data.vocabulary import Vocabulary
from trainer.metrics.metrics import METRICS, MetricsWriter, Window, read_last_step
from trainer.model.flops import gpu_name, peak_flops
from trainer.model.language_model import UnfitEncoderError
from trainer.objectives.base import Validator
from trainer.parallel.world import Request
from trainer.setup.build import build_feed, build_validator
from trainer.setup.config import TrainConfig
from trainer.step.step import NonFiniteLossError, StepMetrics, Stepper
from trainer.worker.heartbeat import Heartbeat, Stopwatch


def never() -> bool:
    """No notice ever comes."""
    return False


@dataclasses.dataclass
class Worker:
    """One worker's run from its latest checkpoint to the last step.

    Attributes:
        notice: asked after every step: must this machine be left? One worker's yes ends the run of all, saved.
        heartbeat: what it does now, for those who watch.
        stopwatch: where the time goes until the first step.
        skipped: steps so far whose update was left out because of a bad loss.
        skipped_in_a_row: the last ones among them.
        early: the run has ended before its last step, because its scores get no better.
    """

    config: TrainConfig
    run: Path
    shards: ShardSet
    stepper: Stepper
    plan: Plan
    vocabulary: Vocabulary
    device: torch.device
    notice: Callable[[], bool] = never
    heartbeat: Heartbeat = dataclasses.field(default_factory=lambda: Heartbeat(0, 1))
    stopwatch: Stopwatch = dataclasses.field(default_factory=lambda: Stopwatch({"worker": time.time()}))
    skipped: int = 0
    skipped_in_a_row: int = 0
    early: bool = False

    def __post_init__(self) -> None:
        self.early_stopping = EarlyStopping(self.run, self.config.validation.score, self.config.validation.patience)

    def run_to_end(self) -> int:
        """Resumes, trains, validates and saves to the last step, or an earlier end; returns the last step taken.

        Raises:
            NonFiniteLossError: on every rank alike.
            SaveError: checkpoints cannot be written; on every rank.
            UnfitEncoderError: a start with random weights where trained ones are due; on every rank.
        """
        config, stepper, world = self.config, self.stepper, self.stepper.world
        done = self.heartbeat.step = self.resume()
        if done == 0:
            self.refuse_random_weights()
        if done < stepper.total_steps and Request.EARLY in world.agree(self.early_stopping.request):
            self.early = True
            self.heartbeat.set_phase("ended")
            return done
        feed = build_feed(stepper.objective, stepper.encoder, self.vocabulary)
        mine = rank_plan(self.plan, self.shards, world.rank, world.size, done, stepper.total_steps, config.data)
        ahead = Ahead(batches(mine, feed, self.device))
        ahead.begin()  # while the untrained encoder is scored
        validator = build_validator(config, stepper, self.shards, self.vocabulary, self.device)
        with contextlib.ExitStack() as stack:
            metrics, saver = None, None
            if world.rank == 0:
                metrics = stack.enter_context(contextlib.closing(MetricsWriter(self.run, done)))
                saver = Saver(
                    self.run / CHECKPOINTS,
                    config.checkpoint,
                    config.validation.score,
                    before=metrics.flush,  # a resume finds all lines of a checkpoint's steps
                    after=after_save(config.run, self.run, config.checkpoint, config.validation.score)
                    or self.early_stopping.saved,
                )
                stack.enter_context(contextlib.closing(saver))
            if done == 0 and validator is not None:
                self.score(validator, metrics, 0)
            return self.take_steps(done, ahead, validator, metrics, saver)

    def refuse_random_weights(self) -> None:
        """The driver has looked at its own copy of a pretrained encoder; this worker's may be another.

        Raises:
            UnfitEncoderError: on every rank, if any rank's copy lacks weights.
        """
        encoder, world = self.config.encoder, self.stepper.world
        needs_head = self.config.objective.mlm and not encoder.new_mlm_head
        found = self.stepper.encoder.unloaded.problems(encoder.pretrained, needs_head)
        if world.largest(len(found)):
            raise UnfitEncoderError(
                "; ".join(found) or f"encoder.pretrained = {encoder.pretrained}: see another worker"
            )

    def take_steps(
        self, done: int, ahead: Ahead, validator: Validator | None, metrics: MetricsWriter | None, saver: Saver | None
    ) -> int:
        """The steps after `done`; returns the last one taken."""
        config, stepper, world, heartbeat = self.config, self.stepper, self.stepper.world, self.heartbeat
        peak = peak_flops(gpu_name(self.device), half=config.precision == "bf16")
        peak = None if peak is None else peak * world.size
        window = Window()
        self.stopwatch.mark("model")
        heartbeat.set_phase("data")
        for step, batch in enumerate(ahead, start=done + 1):
            begun = time.monotonic()
            heartbeat.set_phase("forward")
            if step == done + 1:
                self.stopwatch.mark("batch")
            measured = self.take(batch, step)
            if step == done + 1:
                if metrics and step == 1 and (remark := self.remark(measured)):
                    get_logger().warning("%s", remark)
                self.stopwatch.mark("first")
                heartbeat.start = self.stopwatch.parts()
                if metrics:
                    metrics.start(step, {**heartbeat.start, "workers": world.size})
            if metrics:
                rates = window.rates(measured, config.batch_documents, ahead.waited_seconds, peak)
                heartbeat.line = metrics.step(step, measured, rates)
            ahead.waited_seconds = 0.0
            heartbeat.finish_step(step, time.monotonic() - begun)
            last = step == stepper.total_steps
            scores = {}
            if validator is not None and (last or step % config.validation.every_steps == 0):
                scores = self.score(validator, metrics, step)
            if self.between(step, scores, saver):
                heartbeat.set_phase("ended")
                return step
            window = Window()
        return done

    def remark(self, measured: StepMetrics) -> str | None:
        """A warning of the objective about the first step of the run."""
        return self.config.objective.remark_after_first_step(self.stepper.objective.run, measured.terms)

    def take(self, batch: RankBatch, step: int) -> StepMetrics:
        """One step; where a bad loss may be skipped, its documents are used up and nothing else has changed.

        Raises:
            NonFiniteLossError: on every rank alike.
        """
        try:
            measured = self.stepper.step(batch, step)
        except NonFiniteLossError as error:
            if self.config.on_bad_loss == "stop" or error.measured is None:
                raise
            self.skipped += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row > self.config.max_skipped_steps:
                raise NonFiniteLossError(
                    f"{error}. It is the {self.skipped_in_a_row}th step like this in a row, and max_skipped_steps = "
                    f"{self.config.max_skipped_steps}"
                ) from error
            get_logger().warning("step %d: loss or gradient not finite, skipped (%d so far)", step, self.skipped)
            return error.measured
        self.skipped_in_a_row = 0
        return measured

    def between(self, step: int, scores: dict[str, float], saver: Saver | None) -> bool:
        """What all workers do together after a step: save, stop, neither; answers whether this was the last step.

        Raises:
            SaveError: on every rank.
        """
        request = self.early_stopping.request | (Request.STOP if self.notice() else Request(0))
        if saver is not None:
            request |= Request.SAVE if saver.due(step) else Request(0)
            request |= Request.FAIL if saver.failed() else Request(0)
        request = self.stepper.world.agree(request)
        if Request.FAIL in request:
            if saver is not None:
                saver.check()
            raise SaveError("the first worker cannot write checkpoints any more")
        self.early = Request.EARLY in request
        end = step == self.stepper.total_steps or Request.STOP in request or self.early
        if end or Request.SAVE in request:
            with self.heartbeat.doing("saving"):
                self.save(step, scores, saver)
                if end and saver is not None:
                    saver.wait()
        return end

    def resume(self) -> int:
        """Loads the newest whole checkpoint of this run, if any; returns the steps done. Rank 0 chooses for all.

        Raises:
            CheckpointError: a worker does not find whole what the first one found whole.
        """
        folder, world = self.run / CHECKPOINTS, self.stepper.world
        found = None
        if world.rank == 0:
            expected = {"config_hash": self.config.hash(), "data_hash": data_hash(self.shards.manifest)}
            found = checkpoint.find_latest(folder, expected)
        done = world.largest(0 if found is None else found[1].step)
        if done:
            path = checkpoint.checkpoint_path(folder, done)
            state = checkpoint.read_state(path) if found is None else found[1]
            checkpoint.load(path, self.stepper.encoder, self.stepper.optimizer, self.stepper.objective)
            self.skipped, self.skipped_in_a_row = state.skipped, state.skipped_in_a_row
        if world.rank == 0:
            self.early_stopping.resume(done)
            self.log_start(done)
        return done

    def log_start(self, done: int) -> None:
        """Logs where the run goes on, and what is done a second time."""
        line = read_last_step(self.run / METRICS)
        taken = 0 if line is None else line["step"]
        if done or taken:
            again = f"; steps {done + 1} to {taken} are taken again" if taken > done else ""
            get_logger().info("continuing after step %d%s", done, again)

    def score(self, validator: Validator, metrics: MetricsWriter | None, step: int) -> dict[str, float]:
        """Held-out scores of the weights after a step, logged.

        Raises:
            NonFiniteLossError: on every rank alike.
        """
        with self.heartbeat.doing("validating"):
            scores = validator.scores(self.stepper.encoder)
        if scores is None:
            raise NonFiniteLossError(
                f"step {step}: held-out embeddings are not finite. Try a smaller optim.lr (now {self.config.optim.lr}) "
                "or precision: fp32"
            )
        if metrics:
            metrics.scores(step, scores)
            self.early_stopping.measured(step, scores)
        return scores

    def save(self, step: int, scores: dict[str, float], saver: Saver | None) -> None:
        """Copies the checkpoint for the first worker's saver; every worker takes part."""
        stepper = self.stepper
        memory = saver.reuse_memory() if saver is not None else None
        contents = checkpoint.collect(
            stepper.encoder, stepper.optimizer, stepper.objective, keep=saver is not None, memory=memory
        )
        if saver is not None:
            state = RunState(
                step=step,
                documents=step * self.config.batch_documents,
                world_size=stepper.world.size,
                config_hash=self.config.hash(),
                data_hash=data_hash(self.shards.manifest),
                scores=scores,
                files={},
                skipped=self.skipped,
                skipped_in_a_row=self.skipped_in_a_row,
            )
            saver.submit(state, contents)
