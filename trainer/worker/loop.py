"""The training loop of every worker: resume, get a batch, step, log, validate, save."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from declutr.common.console.logs import get_logger
from declutr.common.errors import EncoderError, UsageError
from declutr.common.stores.address import is_remote
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.metrics.alarms import Alarms
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.metrics.loggers import Log, wandb_run
from declutr.trainer.metrics.metrics import MetricsWriter, memory_mib, peak_memory_mib
from declutr.trainer.objectives.base import Validator
from declutr.trainer.objectives.config import REPORTED
from declutr.trainer.objectives.scores import divide
from declutr.trainer.parallel.communicator import Agreement, Request
from declutr.trainer.step.step import NonFiniteLossError, PendingStep, StepMetrics, TrainStep
from declutr.trainer.step.task import gpu_name, peak_flops
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.device import DeviceEvent
from declutr.trainer.worker.heartbeat import Heartbeat

if TYPE_CHECKING:  # loads Ray, which an estimate does not need
    from declutr.trainer.data.stream import Prefetcher


def take(train_steps: Sequence[TrainStep], batch: Mapping[str, RankBatch], step: int) -> StepMetrics:
    """Takes all updates of a step; a bad loss leaves out its own update alone."""
    return read(begin(train_steps, batch, step))


def begin(
    train_steps: Sequence[TrainStep], batch: Mapping[str, RankBatch], step: int, agreement: Agreement | None = None
) -> list[PendingStep]:
    """As `take`, but leaves the metrics to be read later, if they may be, and agrees on the workers' requests."""
    pending = []
    for train_step in train_steps:
        pending.append(train_step.begin(batch, step, agreement if train_step is train_steps[-1] else None))
        if not _all_late(train_steps):
            pending[-1].read()
    return pending


def _all_late(train_steps: Sequence[TrainStep]) -> bool:
    """True if metrics may be read while the next step is computed."""
    return all(train_step.late for train_step in train_steps)


def read(pending: Sequence[PendingStep]) -> StepMetrics:
    """Metrics of all updates of a step: sums of loss and counts; norm, rate and digest by task."""
    parts = [step.read() for step in pending]
    *other_parts, main = parts
    if not other_parts:
        return main
    tokens = sum(part.num_tokens for part in parts)
    places = sum(part.num_tokens / max(1e-9, 1 - part.padding_share) for part in parts)  # 1e-9: no division by 0
    auxiliary = {
        f"{step.train_step.name}_{key}": getattr(part, key)
        for step, part in zip(pending, other_parts, strict=False)
        for key in ("grad_norm", "lr", "batch_digest", "skipped")
    }
    return replace(
        main,
        loss=sum(part.loss for part in parts),
        terms={name: value for part in (main, *other_parts) for name, value in part.terms.items()},
        num_selected=sum(part.num_selected for part in parts),
        num_tokens=tokens,
        padding_share=1 - tokens / max(1.0, places),
        flops=sum(part.flops for part in parts),
        auxiliary={name: value for part in parts for name, value in part.auxiliary.items()} | auxiliary,
    )


@dataclass
class TrainingLoop:
    """One worker's run from its latest checkpoint to the last step."""

    config: TrainConfig
    run: Path  # folder of the run
    device: torch.device
    train_steps: Sequence[TrainStep]  # one for each update of a step, in their order; the last has the main task
    checkpointing: Checkpointing  # resumes, saves, ends the run
    prefetch: "Callable[[int], Prefetcher]"  # builds the prefetcher of this worker's batches after a number of steps
    validator: Validator | None  # scores the encoder on held-out documents, or None
    stop: Callable[[], bool]  # returns true if this worker has a notice to stop; called after every step
    heartbeat: Heartbeat  # shows step and phase to the driver
    began: float  # begin of this start, of the command or after a failure (Unix time of the driver's clock)
    # the rows of each corpus in a step by the names of their metrics; none of a single corpus.
    corpus_rows: Callable[[int], dict[str, float | None]] = lambda _: {}

    def train(self) -> int:
        """Trains to the last step, or to an earlier end; returns the last step taken.

        Raises:
            NonFiniteLossError: a loss, gradient or embedding is not finite; on every rank.
            SaveError: checkpoints cannot be written; on every rank.
            EncoderError: the encoder would start with random instead of pretrained weights; on every rank.
        """
        done = self.heartbeat.step = self.checkpointing.resume()
        if done == 0:  # later weights are those of a checkpoint
            self.refuse_random_weights()
        if self.checkpointing.ended(done):
            self.heartbeat.phase = "ended"
            return done
        with (
            contextlib.closing(self.prefetch(done)) as batches,
            self.recording(done) as metrics,
            self.checkpointing.writing(before=metrics.flush if metrics else lambda: None),
        ):
            batches.begin()  # fills while the initial encoder is scored
            if self.checkpointing.at_start:
                self.validate(done, metrics)
            return self.take_steps(done, batches, metrics)

    def recording(self, done: int) -> AbstractContextManager[MetricsWriter | None]:
        """The metrics of the run while the block runs; only the first worker writes them."""
        if self.train_step.comm.rank:
            return contextlib.nullcontext()
        config = self.config
        settings = {
            "optim.lr": config.optim.lr,
            "microbatch_tokens": config.microbatch_tokens,
            "scaling.data_cpus": config.scaling.data_cpus,
        }
        for name, task in config.auxiliary_tasks.items():
            if task.optim is not None:
                settings[f"auxiliary_tasks.{name}.optim.lr"] = task.optim.lr
        alarms = Alarms({name: task.objective for name, task in config.tasks().items()}, settings, memory_mib())
        loggers = dict[str, Callable[[], AbstractContextManager[Log]]]()
        if config.metrics.wandb.mode != "disabled":
            facts = self.checkpointing.identity | {"run": config.run}
            if not is_remote(config.run):  # an address is one run on every host
                facts["host"] = socket.gethostname()
            config_values = config.model_dump(mode="json")
            loggers["Weights & Biases"] = partial(wandb_run, config.metrics.wandb, self.run, facts, config_values)
        # a start that was killed before its first save has its scores already; its settings may have been others
        return contextlib.closing(MetricsWriter(self.run, done, alarms, loggers, self.checkpointing.at_start))

    def take_steps(self, done: int, batches: "Prefetcher", metrics: MetricsWriter | None) -> int:
        """Takes the steps after `done`; returns the last one taken."""
        train_step, heartbeat = self.train_step, self.heartbeat
        every = steps_between(self.config.validation.every_steps, train_step.total_steps)
        peak = peak_flops(gpu_name(self.device), half=train_step.tasks[0].autocast is not None)
        peak = None if peak is None else peak * train_step.comm.size
        recorder = Recorder(self, done + 1, batches, metrics, peak, partial(DeviceEvent, self.device))
        heartbeat.phase = "data"
        for step, batch in enumerate(batches, start=done + 1):
            heartbeat.phase = "forward"
            agreement = Agreement(partial(self.requests, step))
            pending, ended = begin(self.train_steps, batch, step, agreement), recorder.event()
            recorder.flush_pending()  # the step before, which the device finishes while it has this one to compute
            recorder.add(pending, ended)
            due = step == train_step.total_steps or (every and step % every == 0)
            # else the next step's time would hold the validation, and the start's time that of a second step
            if due or step == done + 1 or not _all_late(self.train_steps):
                recorder.flush_pending()
            heartbeat.finish_step(step)
            scores = self.validate(step, metrics) if due else {}
            if self.checkpointing.after_step(step, scores, self.stop(), recorder.flush_pending, agreement.agreed):
                heartbeat.phase = "ended"
                return step
            recorder.restart_clock()
        return done

    def requests(self, step: int) -> Request:
        """Requests of this worker after a step, as far as they are known while the step is computed."""
        return self.checkpointing.requests(step, {}, self.stop())

    @property
    def train_step(self) -> TrainStep:
        """The train step of the main task."""
        return self.train_steps[-1]

    def validate(self, step: int, metrics: MetricsWriter | None) -> dict[str, float]:
        """Computes and records held-out scores of the weights after a step; empty without a validator."""
        if self.validator is None:
            return {}
        half = self.train_step.tasks[0].autocast if self.device.type == "cuda" else None
        with self.heartbeat.doing("validating"), torch.autocast(self.device.type, half, enabled=half is not None):
            all_scores = self.validator.scores(self.train_step.encoder)
        if all_scores is None:
            raise NonFiniteLossError(
                f"step {step}: held-out embeddings are not finite. Try a smaller optim.lr (now {self.config.optim.lr}) "
                "or precision: fp32"
            )
        score = self.config.validation.score
        scores, name, rows = divide(all_scores, self.config.seed, score)
        if self.config.chooses and score not in scores:
            raise UsageError(
                f"validation.score = {score}: the held-out rows have only {', '.join(scores)}, so no checkpoint could "
                "be chosen by it; set another score or export=last, or prepare more rows"
            )
        if metrics:
            metrics.add("validation", step, scores)
            chosen = [key for key in (score, REPORTED + score) if key in scores] or scores
            text = ", ".join(f"{key} {scores[key]:.4f}" for key in chosen)
            get_logger().info("validated after step %d of %d: %s", step, self.train_step.total_steps, text)
        self.checkpointing.scored(step, scores, name, rows)
        return scores

    def log_first_step(self, step: int, measured: StepMetrics, metrics: MetricsWriter | None) -> None:
        """Records the time of the start, and logs the objective's remark about the run's first loss."""
        objective = self.train_step.tasks[0].objective
        remark = self.config.objective.remark_after_first_step(objective.run, measured.terms)
        if step == 1 and remark and self.train_step.comm.rank == 0:
            get_logger().warning("%s", remark)
        if metrics:
            seconds = time.time() - self.began  # Unix time, as another process took the begin
            get_logger().info("step %d, %.1f s after the start", step, seconds)
            metrics.add("start", step, {"start_seconds": seconds, "workers": self.train_step.comm.size})

    def refuse_random_weights(self) -> None:
        """Checks this worker's copy of a pretrained encoder; the driver has checked its own."""
        encoder = self.config.encoder
        needs_head = self.config.objective.mlm and not encoder.new_mlm_head
        problems = self.train_step.encoder.load_report.problems(encoder.pretrained, needs_head)
        # hosts may have other copies; an error on one alone would leave the others waiting
        if self.train_step.comm.all_reduce_max(len(problems)):
            raise EncoderError(
                "; ".join(problems)
                or f"encoder.pretrained = {encoder.pretrained}: weights are missing on another worker"
            )


@dataclass
class Recorder:
    """Reads and records the metrics of each step, on a GPU while the next step is computed."""

    loop: TrainingLoop  # the training loop
    first: int  # number of the first step
    batches: "Prefetcher"  # the prefetcher
    metrics: MetricsWriter | None  # metrics of the run; None on other workers than the first
    peak: float | None  # FLOPs per second of all devices together; None if unknown
    event: Callable[[], DeviceEvent]  # marks the present end of the device's queue

    def __post_init__(self) -> None:
        """Starts the time of the first record."""
        self._pending: list[PendingStep] = []
        self._began = self.event()

    def add(
        self,
        pending: list[PendingStep],  # its updates
        ended: DeviceEvent,  # their end on the device
    ) -> None:
        """Keeps a step until its metrics are read."""
        self._pending, self._ended = pending, ended
        self._waited_seconds, self.batches.waited_seconds = self.batches.waited_seconds, 0.0

    def flush_pending(self) -> None:
        """Records the pending step, if there is one."""
        if not self._pending:
            return
        step, measured = self._pending[0].step, read(self._pending)
        self._pending = []
        self._ended.wait()
        # A GPU may have done the next step too by now: its own clock tells them apart.
        seconds = max(self._ended.seconds_since(self._began), 1e-9)
        if step == self.first:
            self.loop.log_first_step(step, measured, self.metrics)
        if self.metrics:
            speed = {
                "seconds": seconds,
                "tokens_per_second": measured.num_tokens / seconds,
                "documents_per_second": self.loop.config.batch_documents / seconds,
                # a GPU may compute the step before in this time
                "data_wait_share": min(1.0, self._waited_seconds / seconds),
                "mfu": None if self.peak is None else measured.flops / seconds / self.peak,
                "peak_memory_mib": peak_memory_mib(),
            }
            self.loop.heartbeat.line = self.metrics.add(
                "step", step, measured.line() | speed | self.loop.corpus_rows(step)
            )
        self._began = self._ended

    def restart_clock(self) -> None:
        """Leaves validation and saving out of the time of the next step."""
        if not self._pending:
            self._began = self.event()
