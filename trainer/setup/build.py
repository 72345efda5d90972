"""From a configuration and its shards' tokenizer to the parts of a run. No Ray: checks and benchmarks use them too."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from pipeline.shards.manifest import TOKENIZER, ShardError, load_manifest
from pipeline.shards.shards import ShardSet
from pipeline.tokenizer.tokenization import fingerprint
from trainer.data.plan import Plan
from trainer.data.vocabulary import Vocabulary
from trainer.model.encoder import Encoder
from trainer.model.language_model import load_hf_config, load_model, max_span_tokens, vocabulary_of
from trainer.model.layouts import fitting_layout
from trainer.objectives.declutr.feed import Feed
from trainer.objectives.declutr.objective import Declutr
from trainer.objectives.declutr.validation import Validator, build_validator
from trainer.objectives.span_settings import SpanConfig
from trainer.parallel.sharding import shard
from trainer.parallel.world import World
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig
from trainer.step.microbatch import Microbatch
from trainer.step.optim import build_optimizer
from trainer.step.step import Stepper


def load_tokenizer(folder: Path) -> tuple[Any, Vocabulary]:
    """The tokenizer that made the shards of a folder, and what the feed knows of it.

    Raises:
        ShardError: the tokenizer there is another.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False)
    if fingerprint(tokenizer) != load_manifest(folder).tokenizer.fingerprint:
        raise ShardError(f"the tokenizer in {folder / TOKENIZER} is not the one that made the shards")
    return tokenizer, vocabulary_of(tokenizer)


def total_steps(config: TrainConfig, plan: Plan) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else plan.steps_in(config.epochs or 1.0)


def build_encoder(config: TrainConfig, tokenizer: Any) -> Encoder:
    """The untrained encoder of a configuration, in a layout that fits it; from scratch the same on every worker.

    Raises:
        UnfitEncoderError: it cannot be trained here.
    """
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    hf = load_hf_config(config.encoder, len(tokenizer), ids)
    model, unloaded = load_model(config.encoder, hf, config.seed)
    encoder = Encoder(config.encoder, model, config.seed, unloaded)
    layout = fitting_layout(encoder, config.objective.mlm)
    encoder.set_layout(config.encoder.model_copy(update={"layout": layout}))
    return encoder


def build_feed(config: TrainConfig, encoder: Encoder, vocabulary: Vocabulary) -> Feed:
    """What turns the documents of `config.data` into the spans of a step."""
    objective = config.objective
    return Feed(
        spans=config.spans,
        masking=objective.masking if objective.mlm else None,
        unmasked_anchors=objective.unmasked_anchors,
        include_positives=objective.contrastive,
        max_content=max_span_tokens(encoder.model) - vocabulary.num_specials,
        vocabulary=vocabulary,
        seed=config.seed,
        short_documents=load_manifest(data_folder(config.data, config.cache)).short_documents,
    )


def build_stepper(
    config: TrainConfig, encoder: Encoder, world: World, total_steps: int, microbatch: Microbatch
) -> Stepper:
    """What takes steps: the encoder's unused parameters frozen and all of them sharded, objective, optimizer."""
    freeze_unused(encoder, config)
    if config.scaling.shard_parameters:
        shard(encoder, world)
    return Stepper(
        encoder=encoder,
        objective=Declutr(config.objective, config.spans.num_anchors, config.spans.num_positives),
        optimizer=build_optimizer(config.optim, encoder),
        optim=config.optim,
        world=world,
        seed=config.seed,
        total_steps=total_steps,
        microbatch=microbatch,
        autocast=torch.bfloat16 if config.precision == "bf16" else None,
    )


def freeze_unused(encoder: Encoder, config: TrainConfig) -> None:
    """Parameters that the objective never touches get no gradient, hence no weight decay either."""
    used = {id(p) for p in encoder.model.base_model.parameters()}
    if config.objective.contrastive:
        used |= {id(p) for p in encoder.projection.parameters()}
    if config.objective.mlm:
        used |= {id(p) for p in encoder.model.parameters()}
    for parameter in encoder.parameters():
        parameter.requires_grad_(id(parameter) in used)


def held_out_validator(
    config: TrainConfig, encoder: Encoder, vocabulary: Vocabulary, world: World, device: torch.device
) -> Validator:
    """Scores on the held-out split: unmasked, with positives, whatever the objective trains."""

    def feed_for(spans: SpanConfig) -> Feed:
        feed = build_feed(config, encoder, vocabulary)
        return dataclasses.replace(feed, spans=spans, masking=None, unmasked_anchors=False, include_positives=True)

    shards = ShardSet(data_folder(config.data, config.cache), "held-out")
    return build_validator(config.validation, config.spans, shards, feed_for, config.seed, world, device)
