"""Builds the parts of a run from its configuration and shards. No Ray: checks and benchmarks use it too."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from declutr.common import seeding
from declutr.common.errors import ShardError, UsageError
from declutr.common.paths import expand
from declutr.pipeline.shards.manifest import TOKENIZER, Manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.pipeline.tokenizer.tokenization import fingerprint
from declutr.trainer.data.batches import Collator
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.metrics.sts import StsValidator, read_judged, together
from declutr.trainer.model.behind import read_behind
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import (
    load_hf_config,
    load_model,
    load_with_dropout_layers,
    max_span_tokens,
    vocabulary_of,
)
from declutr.trainer.model.layouts import fitting_layout
from declutr.trainer.objectives.base import Objective, Validator, implementation_of
from declutr.trainer.setup.cache import data_folder
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.task import TrainTask


def load_tokenizer(folder: Path, manifest: Manifest | None = None) -> tuple[Any, Vocabulary]:
    """The tokenizer that made the shards of a folder, and its ids.

    Args:
        folder: the shards.
        manifest: the shards' manifest; None: it is read from the folder.

    Raises:
        ShardError: the shards were made with another tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False)
    if fingerprint(tokenizer) != (manifest or load_manifest(folder)).text_tokenizer.fingerprint:
        raise ShardError(f"the tokenizer in {folder / TOKENIZER} is not the one that made the shards")
    return tokenizer, vocabulary_of(tokenizer)


def build_encoder(config: TrainConfig, tokenizer: Any) -> Encoder:
    """The untrained encoder of a configuration, in a layout that fits it.

    Weights from scratch are the same on every worker.

    Raises:
        EncoderError: the encoder cannot be trained.
    """
    names = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    hf = load_hf_config(config.encoder, len(tokenizer), ids)
    objectives = [task.objective for task in config.tasks().values()]
    load = load_with_dropout_layers if any(objective.sets_rates for objective in objectives) else load_model
    model, load_report = load(config.encoder, hf, config.seed)
    settings = config.encoder
    if config.scaling.elastic_determinism:  # compiled kernels depend on the lengths seen before
        settings = settings.model_copy(update={"compile": False})
    encoder = Encoder(settings, model, config.seed, load_report, read_behind(config.encoder.pretrained))
    layout = fitting_layout(encoder, any(objective.mlm for objective in objectives))
    encoder.set_layout(settings.model_copy(update={"layout": layout}))
    # The sizes stand in the model's settings, as in published encoders; those of an earlier training are removed.
    matryoshka, stored = config.objective.matryoshka, encoder.model.config
    if matryoshka is not None:
        stored.matryoshka_dimensions = sorted(size for size, _ in matryoshka.cuts(encoder.output_size))
    elif hasattr(stored, "matryoshka_dimensions"):
        del stored.matryoshka_dimensions
    return encoder


def build_objective(config: TrainConfig, encoder: Encoder, manifest: Manifest) -> Objective[Any]:
    """The objective for the shards of a manifest; see `new_objective`."""
    return new_objective(config, encoder, manifest.short_documents)


def new_objective(config: TrainConfig, encoder: Encoder, short_documents: ShortDocuments) -> Objective[Any]:
    """The objective, with the encoder's device and precision; its weights are the same on every worker.

    Raises:
        UsageError: its class cannot be loaded, or its constructor raised an error.
    """
    run = config.context(short_documents)
    kind = implementation_of(config.objective)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(config.seed, "objective"))
        try:
            objective = kind(config.objective, run, encoder.embedding_size)
        except (Exception, SystemExit) as error:  # of any package; a restart would raise it again
            raise UsageError(
                f"objective {config.objective.kind}: {kind.__name__}(...) raised {type(error).__name__}: {error}"
            ) from error
    parameter = next(encoder.parameters())
    return objective.to(parameter.device, parameter.dtype).train()


def build_collator(objective: Objective[Any], encoder: Encoder, vocabulary: Vocabulary) -> Collator:
    """The collator of an objective, with spans that fit the encoder."""
    return objective.collator(vocabulary, max_content(encoder, vocabulary))


def max_content(encoder: Encoder, vocabulary: Vocabulary) -> int:
    """Largest number of tokens of a span, without specials, for which the encoder has positions."""
    return max_span_tokens(encoder.model) - vocabulary.num_specials


@dataclass(frozen=True)
class _TaskValidator:
    """The scores of an auxiliary task, behind its name."""

    label: str
    validator: Validator

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        scores = self.validator.scores(encoder)
        return None if scores is None else {f"{self.label}{name}": float(value) for name, value in scores.items()}


def build_validator(
    config: TrainConfig,
    task: TrainTask,
    shards: ShardSet,
    tokenizer: Any,
    device: torch.device,
    auxiliary: Sequence[tuple[TrainTask, ShardSet]] = (),
) -> Validator | None:
    """The scores of a validation: the objective's on held-out rows, and those of judged pairs; None without any.

    Those of `auxiliary` tasks with images or sounds are added. They are numbers, not rows: they choose no checkpoint.
    """
    validation, objective = config.validation, task.objective
    if not validation.every_steps:
        return None
    if validation.data is None:
        held_out = shards.held_out()
    else:
        held_out = ShardSet(data_folder(validation.data, config.cache), "train", look=False)
    vocabulary = vocabulary_of(tokenizer)
    room = max_content(task.encoder, vocabulary)
    validators = []
    if held_out.num_documents > 1:  # all rows may be trained on if judged pairs validate
        validators.append(objective.validator(held_out, vocabulary, room, validation.max_documents, task.comm, device))
    for score, folder in validation.pairs.items():
        pairs = read_judged(score, expand(folder), tokenizer, room + vocabulary.num_specials)
        validators.append(StsValidator(pairs, objective.exported(), task.comm, device, objective.sizes))
    for other, trained in auxiliary:
        rows = trained.held_out()
        if other.frontend is not None and rows.num_documents > 1:
            arguments = rows, other.frontend, validation.max_documents, task.comm, device
            if own := other.objective.clip_validator(*arguments):
                validators.append(_TaskValidator(other.label, own))
    return together([validator for validator in validators if validator is not None])
