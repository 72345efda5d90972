"""The page each worker runs: resume, then batch, step, log, validate, save."""

import dataclasses
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from transformers import AutoTokenizer

from common.config import expand
from common.logs import get_logger, setup_logging
from common.storage import hash_json
from pipeline.manifest import Manifest
from pipeline.shards import ShardSet
from trainer import checkpoint
from trainer.config import TrainConfig
from trainer.feed import Feed, Vocabulary
from trainer.gather import World
from trainer.metrics import MetricsWriter, Window
from trainer.microbatch import Microbatch
from trainer.model import Encoder, build_model, load_hf_config, max_span_tokens, vocabulary_of
from trainer.objectives import Declutr
from trainer.optim import build_optimizer
from trainer.plan import Plan
from trainer.spans import SpanConfig
from trainer.state import RunState
from trainer.step import NonFiniteLossError, Stepper
from trainer.stream import Ahead, batches, rank_plan
from trainer.validation import Validator, build_validator, score_pairs

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"


def data_hash(manifest: Manifest) -> str:
    """Identity of prepared data: every shard's checksum, the tokenizer and the geometry."""
    return hash_json(
        [
            [[shard.name, shard.sha256] for shard in manifest.shards],
            manifest.tokenizer.fingerprint,
            manifest.geometry.model_dump(mode="json"),
        ]
    )


def total_steps(config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else plan.steps_in(config.epochs or 1.0)


def build_encoder(config: TrainConfig, tokenizer: Any) -> Encoder:
    """The untrained encoder of a configuration; from scratch it is the same on every worker."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    hf = load_hf_config(config.encoder, len(tokenizer), ids)
    return Encoder(config.encoder, build_model(config.encoder, hf, config.seed), config.seed)


def build_feed(config: TrainConfig, encoder: Encoder, vocabulary: Vocabulary) -> Feed:
    """What turns documents into the spans of a step."""
    objective = config.objective
    return Feed(
        spans=config.spans,
        masking=objective.masking if objective.mlm else None,
        unmasked_anchors=objective.unmasked_anchors,
        include_positives=objective.contrastive,
        max_content=max_span_tokens(encoder.model) - vocabulary.num_specials,
        vocabulary=vocabulary,
        seed=config.seed,
    )


def held_out_validator(
    config: TrainConfig, encoder: Encoder, vocabulary: Vocabulary, world: World, device: torch.device
) -> Validator:
    """Scores on the held-out split: unmasked, with positives, whatever the objective trains."""

    def feed_for(spans: SpanConfig) -> Feed:
        feed = build_feed(config, encoder, vocabulary)
        return dataclasses.replace(feed, spans=spans, masking=None, unmasked_anchors=False, include_positives=True)

    shards = ShardSet(expand(config.data), "held-out")
    return build_validator(config.validation, config.spans, shards, feed_for, config.seed, world, device)


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

    shards = ShardSet(expand(config.data), "train")
    tokenizer = AutoTokenizer.from_pretrained(shards.folder / TOKENIZER)
    vocabulary = vocabulary_of(tokenizer)
    encoder = build_encoder(config, tokenizer).to(device)
    freeze_unused(encoder, config)
    encoder.train()
    plan = Plan(config.seed, shards.num_documents, config.batch_documents)
    stepper = Stepper(
        encoder=encoder,
        objective=Declutr(config.objective, config.spans.num_anchors, config.spans.num_positives),
        optimizer=build_optimizer(config.optim, encoder),
        optim=config.optim,
        world=world,
        seed=config.seed,
        total_steps=total_steps(config, plan),
        microbatch=Microbatch.of(config.microbatch_tokens, device),
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
    )
    try:
        Worker(config, run, shards, stepper, plan, vocabulary, device).run_to_end()
    except NonFiniteLossError as error:
        return str(error)
    return None


def freeze_unused(encoder: Encoder, config: TrainConfig) -> None:
    """Parameters that the objective never touches get no gradient, hence no weight decay either."""
    used = {id(p) for p in encoder.model.base_model.parameters()}
    if config.objective.contrastive:
        used |= {id(p) for p in encoder.projection.parameters()}
    if config.objective.mlm:
        used |= {id(p) for p in encoder.model.parameters()}
    for parameter in encoder.parameters():
        parameter.requires_grad_(id(parameter) in used)


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
        window = Window()
        for step, batch in enumerate(ahead, start=done + 1):
            measured = stepper.step(batch, step)
            window.tokens += measured.num_tokens
            window.documents += config.batch_documents
            window.waited_seconds, ahead.waited_seconds = ahead.waited_seconds, 0.0
            if metrics:
                metrics.step(step, measured, window.rates())
            window = Window()
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
        if self.stepper.world.rank == 0:
            state = RunState(
                step=step,
                documents=step * self.config.batch_documents,
                world_size=self.stepper.world.size,
                config_hash=self.config.hash(),
                data_hash=data_hash(self.shards.manifest),
                scores=scores,
                files={},
            )
            path = checkpoint.save(folder, state, self.stepper.encoder, self.stepper.optimizer, self.stepper.objective)
            saved = ray.train.Checkpoint.from_directory(str(path))
        ray.train.report(
            {"step": step, **scores}, checkpoint=saved, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD
        )
        if self.stepper.world.rank == 0:
            steps = checkpoint.steps_in(folder)[-self.config.checkpoint.keep_last :]
            keep = [checkpoint.checkpoint_path(folder, kept) for kept in steps]
            best = checkpoint.find_best(folder, self.config.validation.score, verify=False)
            checkpoint.prune(folder, [*keep, *([best[0]] if best else [])])
