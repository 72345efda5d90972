"""The page each worker runs: resume, then batch, step, log, validate, save."""

import dataclasses
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from common.config import expand
from common.logs import get_logger, setup_logging
from common.storage import hash_json
from pipeline.manifest import Manifest
from pipeline.shards import ShardSet
from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.feed import Vocabulary
from trainer.flops import gpu_name, peak_flops
from trainer.gather import World
from trainer.metrics import MetricsWriter, Window
from trainer.microbatch import Microbatch, MicrobatchError
from trainer.parts import build_encoder, build_feed, build_stepper, held_out_validator, load_tokenizer, total_steps
from trainer.plan import Plan
from trainer.state import RunState
from trainer.step import NonFiniteLossError, Stepper
from trainer.stream import Ahead, batches, rank_plan
from trainer.validation import Validator, score_pairs

CHECKPOINTS = "checkpoints"


def data_hash(manifest: Manifest) -> str:
    """Identity of prepared data: every shard's checksum, the tokenizer and the geometry."""
    return hash_json(
        [
            [[shard.name, shard.sha256] for shard in manifest.shards],
            manifest.tokenizer.fingerprint,
            manifest.geometry.model_dump(mode="json"),
        ]
    )


def train_loop(settings: dict[str, Any]) -> str | None:
    """Trains on one worker of the group; Ray Train calls it on every worker, again after each failure.

    Args:
        settings: `config`, the TrainConfig as JSON.

    Returns:
        None at the end of the run; else why it cannot go on. What would fail again is returned rather than raised, or
        Ray Train would start the workers again `max_failures` times; every rank sees it alike, so none is left waiting.
    """
    config = TrainConfig.model_validate(settings["config"])
    context = ray.train.get_context()
    world = World(context.get_world_rank(), context.get_world_size())
    setup_logging(f"worker {world.rank}/{world.size}")
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        torch.set_num_threads(config.scaling.cpus_per_worker)
    run = expand(config.run).absolute()

    shards = ShardSet(expand(config.data), "train", look=False)  # the driver has looked
    tokenizer, vocabulary = load_tokenizer(shards.folder)
    encoder = build_encoder(config, tokenizer).to(device).train()
    plan = Plan(config.seed, shards.num_documents, config.batch_documents)
    microbatch = Microbatch.of(config.microbatch_tokens, device)
    stepper = build_stepper(config, encoder, world, total_steps(config, plan), microbatch)
    try:
        Worker(config, run, shards, stepper, plan, vocabulary, device).run_to_end()
    except (NonFiniteLossError, MicrobatchError) as error:
        return str(error)
    return None


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

    def run_to_end(self) -> None:
        """Resumes, trains, validates and saves until the last step."""
        config, stepper, world = self.config, self.stepper, self.stepper.world
        done = self.resume()
        validator = None
        if config.validation.every_steps:
            validator = held_out_validator(config, stepper.encoder, self.vocabulary, world, self.device)
        metrics = MetricsWriter(self.run, done) if world.rank == 0 else None
        if done == 0 and validator is not None:
            self.score(validator, metrics, 0)

        feed = build_feed(config, stepper.encoder, self.vocabulary)
        mine = rank_plan(self.plan, self.shards, world.rank, world.size, done, stepper.total_steps)
        ahead = Ahead(batches(mine, feed, self.device))
        peak = peak_flops(gpu_name(self.device), half=config.precision == "bf16")
        peak = None if peak is None else peak * world.size
        window = Window()
        for step, batch in enumerate(ahead, start=done + 1):
            measured = stepper.step(batch, step)
            if metrics:
                rates = window.rates(measured, config.batch_documents, ahead.waited_seconds, peak)
                metrics.step(step, measured, rates)
            ahead.waited_seconds = 0.0
            last = step == stepper.total_steps
            scores = {}
            if validator is not None and (last or step % config.validation.every_steps == 0):
                scores = self.score(validator, metrics, step)
            if last or step % config.checkpoint.every_steps == 0:
                self.save(step, scores)
            window = Window()
        if metrics:
            metrics.close()

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
