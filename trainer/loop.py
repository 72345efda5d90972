"""The page each worker runs: resume, then batch, step, log, validate, save."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.util import get_current_placement_group

from common.config import expand
from common.logs import get_logger, setup_logging
from common.storage import hash_json
from pipeline.manifest import Manifest
from pipeline.shards import ShardSet
from trainer import checkpoint
from trainer.bulletin import Bulletin
from trainer.chunks import rank_plan
from trainer.config import TrainConfig
from trainer.feed import Vocabulary
from trainer.flops import gpu_name, peak_flops
from trainer.metrics import MetricsWriter, Window
from trainer.microbatch import Microbatch, MicrobatchError
from trainer.notice import Ear
from trainer.parts import build_encoder, build_feed, build_stepper, held_out_validator, load_tokenizer, total_steps
from trainer.plan import Plan
from trainer.pulse import Pulse, Stopwatch, WatchedWorld
from trainer.state import RunState
from trainer.step import NonFiniteLossError, Stepper
from trainer.stream import Ahead, batches
from trainer.validation import Validator, score_pairs

CHECKPOINTS = "checkpoints"
STOP = 2  # what ranks agree on after each step


def data_hash(manifest: Manifest) -> str:
    """Identity of prepared data: every shard's checksum, the tokenizer and the geometry."""
    return hash_json(
        [
            [[shard.name, shard.sha256] for shard in manifest.shards],
            manifest.tokenizer.fingerprint,
            manifest.geometry.model_dump(mode="json"),
        ]
    )


def train_loop(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, again after each failure.

    Args:
        settings: `config`, the TrainConfig as JSON; `bulletin`, its name; `marks`, the driver's part of the Stopwatch.

    Returns:
        None at the end of the run; else `given_up`, why it cannot go on, or `stopped`, the notice it was stopped by,
        with `step`, which is saved. What would fail again is returned rather than raised, so that nobody tries again;
        every rank sees it alike, so none is left waiting.
    """
    stopwatch = Stopwatch(settings["marks"])
    stopwatch.mark("group")
    config = TrainConfig.model_validate(settings["config"])
    context = ray.train.get_context()
    group = get_current_placement_group()
    pulse = Pulse(
        context.get_world_rank(),
        context.get_world_size(),
        group.id.hex() if group else "",
        ray.get_runtime_context().get_node_id(),
    )
    setup_logging(f"worker {pulse.rank}/{pulse.size}")
    with Ear(Bulletin(settings["bulletin"]), pulse) as ear:
        return _train(config, pulse, stopwatch, ear.notice)


def _train(
    config: TrainConfig, pulse: Pulse, stopwatch: Stopwatch, notice: Callable[[], str | None]
) -> dict[str, Any] | None:
    world = WatchedWorld(pulse.rank, pulse.size, pulse)
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
    run = expand(config.run).absolute()

    shards = ShardSet(expand(config.data), "train")
    tokenizer, vocabulary = load_tokenizer(shards.folder)
    encoder = build_encoder(config, tokenizer).to(device).train()
    plan = Plan(config.seed, shards.num_documents, config.batch_documents)
    microbatch = Microbatch.of(config.microbatch_tokens, device)
    stepper = build_stepper(config, encoder, world, total_steps(config, plan), microbatch)
    worker = Worker(config, run, shards, stepper, plan, vocabulary, device, pulse, stopwatch, notice)
    try:
        return worker.run_to_end()
    except (NonFiniteLossError, MicrobatchError) as error:
        return {"given_up": str(error)}


@dataclasses.dataclass
class Worker:
    """One worker's run from its latest checkpoint to the last step."""

    config: TrainConfig
    run: Path
    shards: ShardSet
    stepper: Stepper
    plan: Plan
    vocabulary: Vocabulary
    device: torch.device
    pulse: Pulse
    stopwatch: Stopwatch
    notice: Callable[[], str | None]

    def run_to_end(self) -> dict[str, Any] | None:
        """Resumes, trains, validates and saves until the last step, or until a notice to any rank."""
        config, stepper, world, pulse = self.config, self.stepper, self.stepper.world, self.pulse
        done = pulse.step = self.resume()
        feed = build_feed(config, stepper.encoder, self.vocabulary)
        mine = rank_plan(self.plan, self.shards, world.rank, world.size, done, stepper.total_steps)
        ahead = Ahead(batches(mine, feed, self.device))
        ahead.begin()  # while the untrained encoder is scored
        validator = None
        if config.validation.every_steps:
            validator = held_out_validator(config, stepper.encoder, self.vocabulary, world, self.device)
        metrics = MetricsWriter(self.run, done) if world.rank == 0 else None
        if done == 0 and validator is not None:
            self.score(validator, metrics, 0)

        peak = peak_flops(gpu_name(self.device), half=config.precision == "bf16")
        peak = None if peak is None else peak * world.size
        window = Window()
        self.stopwatch.mark("model")
        pulse.turn("data")
        for step, batch in enumerate(ahead, start=done + 1):
            begun = time.monotonic()
            pulse.turn("forward")
            if step == done + 1:
                self.stopwatch.mark("batch")
            measured = stepper.step(batch, step)
            if step == done + 1:
                self.stopwatch.mark("first")
                pulse.start = self.stopwatch.parts()
                if metrics:
                    metrics.start(step, {**pulse.start, "workers": world.size})
            if metrics:
                rates = window.rates(measured, config.batch_documents, ahead.waited_seconds, peak)
                metrics.step(step, measured, rates)
            ahead.waited_seconds = 0.0
            pulse.finished(step, time.monotonic() - begun)
            last = step == stepper.total_steps
            scores = {}
            if validator is not None and (last or step % config.validation.every_steps == 0):
                scores = self.score(validator, metrics, step)
            heard = self.notice()
            stop = not last and world.largest(STOP if heard else 0) == STOP
            if last or stop or step % config.checkpoint.every_steps == 0:
                self.save(step, scores)
            if stop:
                if metrics:
                    metrics.close()
                return {"stopped": heard or "a notice to another worker", "step": step}
            window = Window()
        if metrics:
            metrics.close()
        pulse.turn("ended")
        return None

    def resume(self) -> int:
        """Loads the newest whole checkpoint, if any; returns the steps done."""
        found = checkpoint.find_latest(self.run / CHECKPOINTS)
        if found is None:
            return 0
        path, state = found
        checkpoint.load(path, self.stepper.encoder, self.stepper.optimizer, self.stepper.objective)
        get_logger().info("continuing after step %d (%s)", state.step, path)
        return state.step

    def score(self, validator: Validator, metrics: MetricsWriter | None, step: int) -> dict[str, float]:
        """Held-out scores of the weights after a step, logged.

        Raises:
            NonFiniteLossError: on every rank alike.
        """
        with self.pulse.doing("validating"):
            anchors, positives = validator.embed(self.stepper.encoder)
        if not (anchors.isfinite().all() and positives.isfinite().all()):
            raise NonFiniteLossError(
                f"step {step}: held-out embeddings are not finite. Try a smaller optim.lr (now {self.config.optim.lr}) "
                "or precision: fp32"
            )
        scores = score_pairs(anchors, positives)
        if metrics:
            metrics.scores(step, scores)
        return scores

    def save(self, step: int, scores: dict[str, float]) -> None:
        """Rank 0 writes the checkpoint, all report it, and what need not be kept is deleted."""
        with self.pulse.doing("saving"):
            self._save(step, scores)

    def _save(self, step: int, scores: dict[str, float]) -> None:
        folder = self.run / CHECKPOINTS
        saved = None
        stepper = self.stepper
        writes = stepper.world.rank == 0
        contents = checkpoint.collect(stepper.encoder, stepper.optimizer, stepper.objective, keep=writes)
        if writes:
            state = RunState(
                step=step,
                documents=step * self.config.batch_documents,
                world_size=stepper.world.size,
                config_hash=self.config.hash(),
                data_hash=data_hash(self.shards.manifest),
                scores=scores,
                files={},
            )
            path = checkpoint.save(folder, state, contents)
            saved = ray.train.Checkpoint.from_directory(str(path))
        ray.train.report(
            {"step": step, **scores}, checkpoint=saved, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )
        if writes:
            steps = checkpoint.steps_in(folder)[-self.config.checkpoint.keep_last :]
            keep = [checkpoint.checkpoint_path(folder, kept) for kept in steps]
            best = checkpoint.find_best(folder, self.config.validation.score, verify=False)
            checkpoint.prune(folder, [*keep, *([best[0]] if best else [])])
