"""What benchmarks run on: encoders of known sizes, made-up rows, and the trainer's own step without Ray or downloads.

One seed decides weights, rows, spans and masks: equal seeds give equal bits on any machine.
"""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks import record
from declutr.common import seeding
from declutr.pipeline.readers.corpus import ID_BYTES
from declutr.pipeline.shards.windows import Geometry, window_starts
from declutr.pipeline.shards.writer import shard_schema
from declutr.trainer.build import autocast_type
from declutr.trainer.data.batches import Collator, RankBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import load_hf_config, load_model
from declutr.trainer.objectives.base import Objective, implementation_of
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

POSITIONS = 514  # RoBERTa's first two are never used
TOTAL_STEPS = 1000  # length of the learning rate's schedule
_CPU = torch.device("cpu")
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}  # RoBERTa's
_FIRST_ORDINARY = 4  # lower ids are RoBERTa's special tokens


def _roberta(vocab_size: int, hidden_size: int, num_layers: int, num_heads: int, feed_forward: int) -> dict[str, Any]:
    return {
        "model_type": "roberta",
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 1,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": feed_forward,
    }


SIZES = {
    "tiny": _roberta(1000, 32, 2, 2, 64),
    "demo": _roberta(8000, 192, 3, 6, 768),
    "distilroberta": _roberta(50265, 768, 6, 12, 3072),
    "roberta-base": _roberta(50265, 768, 12, 12, 3072),
}


def add_options(options: argparse.ArgumentParser, model: str, documents: int, spans: tuple[int, int]) -> None:
    """Add the options of `Workload.of`, and the number of documents, with these defaults."""
    options.add_argument("--model", choices=SIZES, default=model, help="size of the encoder; default: %(default)s")
    options.add_argument("--documents", type=int, default=documents, help="per step; default: %(default)s")
    meaning = f"tokens per span, no special ones; default: {spans[0]} {spans[1]}"
    options.add_argument("--spans", type=int, nargs=2, metavar=("MIN", "MAX"), default=list(spans), help=meaning)


def vocabulary(size: str) -> Vocabulary:
    """RoBERTa's special ids, with the mask as the last id."""
    ids = int(SIZES[size]["vocab_size"])
    return Vocabulary(size=ids, bos=0, eos=2, mask=ids - 1, special=(0, 1, 2, 3, ids - 1))


def _model(size: str, config: EncoderConfig, seed: int) -> PreTrainedModel:
    return load_model(config, load_hf_config(config, int(SIZES[size]["vocab_size"]), dict(_IDS)), seed)[0]


def documents(first: int, count: int, spans: SpanConfig, vocab_size: int, seed: int) -> pa.Table:
    """Documents [first, first + count) of an endless corpus, in the shards' schema.

    A document has between one and two times the tokens that its anchors need (2048 and more with the paper's spans).
    Its tokens are drawn uniformly from the vocabulary without special ids.
    """
    schema = shard_schema(vocab_size, Geometry(num_anchors=spans.num_anchors, max_tokens=spans.max_tokens), "made up")
    numbers, shares = _shares(first, count, seed, "benchmark lengths")
    min_document_tokens = spans.min_document_tokens
    lengths = min_document_tokens + (shares[:, 0] * min_document_tokens).astype(np.int64)
    columns = [
        [_identity(seed, number) for number in numbers.tolist()],
        list(_tokens(numbers, lengths, vocab_size, seed)),
        [window_starts(length, spans.max_tokens) for length in lengths.tolist()],
        lengths,
        ["made up"] * count,
        numbers.astype(np.int64),
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def _shares(first: int, count: int, seed: int, purpose: str) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Numbers of rows, and `(count, n)` draws from [0, 1) for each."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    zeros = np.zeros_like(numbers)
    return numbers, seeding.unit(seeding.blocks(seed, purpose, numbers, zeros, zeros))


def _identity(seed: int, number: int) -> bytes:
    return hashlib.blake2b(f"{seed} {number}".encode(), digest_size=ID_BYTES).digest()


def _tokens(numbers: NDArray[np.uint64], lengths: NDArray[np.int64], vocab_size: int, seed: int) -> Iterator[Any]:
    """Ids of each row's tokens."""
    for key, length in zip(np.split(numbers, len(numbers)), lengths.tolist(), strict=True):
        drawn = seeding.unit(seeding.words(seed, "benchmark tokens", key, np.zeros_like(key), length)[0])
        yield _FIRST_ORDINARY + (drawn * (vocab_size - 1 - _FIRST_ORDINARY)).astype(np.int64)


@dataclass(frozen=True)
class Workload:
    """Encoder, documents and step of a benchmark."""

    size: str  # a key of `SIZES`
    spans: SpanConfig
    seed: int
    objective: ObjectiveConfig = field(default_factory=DeclutrConfig)
    dropout: float = 0.0
    attention_dropout: float | None = None  # probability of dropping attention weights; None: the same as `dropout`
    pooling: Literal["mean", "cls"] = "mean"
    device: torch.device = _CPU
    autocast: torch.dtype | None = None  # type of the matrix products, or None

    @classmethod
    def of(cls, options: argparse.Namespace, device: str = "cpu", precision: str | None = None, **fields: Any) -> Self:
        """Make a workload of the options that `add_options` adds and of `seed`."""
        spans = SpanConfig(min_tokens=options.spans[0], max_tokens=options.spans[1])
        place = torch.device(device)
        autocast = autocast_type(precision or "auto", place)
        return cls(options.model, spans, options.seed, device=place, autocast=autocast, **fields)

    def loss(self, embedding_size: int) -> Objective[Any]:
        """Build the objective, with weights drawn from the seed."""
        with torch.random.fork_rng(devices=[]):  # draws of the caller stay the same
            torch.manual_seed(self.seed)
            context = RunContext(self.seed, self.spans)
            objective = implementation_of(self.objective)(self.objective, context, embedding_size)
        return objective.to(self.device).train()

    def collator(self) -> Collator:
        """Build the collator."""
        # RoBERTa uses no position for two, and a span has two special tokens.
        return self.loss(1).collator(vocabulary(self.size), POSITIONS - 4)

    def rows(self, first: int, count: int) -> pa.Table:
        """Documents [first, first + count)."""
        return documents(first, count, self.spans, vocabulary(self.size).size, self.seed)

    def batch(self, first: int, count: int) -> RankBatch:
        """Build one worker's batch of a step from rows [first, first + count)."""
        return self.collator().collate(self.rows(first, count), np.zeros(count, np.int64)).to(self.device)

    def encoder(self, compiled: bool | None = False) -> Encoder:
        """Build the trainer's encoder: packed, in training mode, float32."""
        config = EncoderConfig(
            from_config=SIZES[self.size],
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            pooling=self.pooling,
            compile=compiled,
        )
        return Encoder(config, _model(self.size, config, self.seed), self.seed).train().to(self.device)

    def padded_model(self) -> PreTrainedModel:
        """Build transformers' model with the same weights, its own dropout layers, and torch's fused attention."""
        model = _model(self.size, EncoderConfig(from_config=SIZES[self.size], dropout=self.dropout), self.seed)
        model.set_attn_implementation("sdpa")  # no slower than it can be: a fair baseline
        return model.train().to(self.device)

    def train_step(
        self,
        encoder: Encoder,
        microbatch_tokens: int | None = None,
        comm: Communicator | None = None,
        late: bool = False,
    ) -> TrainStep:
        """Build a train step with the trainer's default optimizer, for one worker by default."""
        optim = OptimConfig()
        loss = self.loss(encoder.embedding_size)
        task = TrainTask(
            encoder=encoder,
            objective=loss,
            comm=comm or Communicator(),
            seed=self.seed,
            microbatch=Microbatch(microbatch_tokens),
            autocast=self.autocast,
        )
        optimizer = build_optimizer(optim, encoder, loss, fused=late or None)
        return TrainStep(tasks=(task,), optimizer=optimizer, optim=optim, total_steps=TOTAL_STEPS, late=late)


def seconds_of_steps(train_step: TrainStep, batches: Sequence[RankBatch], first: int) -> list[float]:
    """Wall seconds of steps from number `first` on, each from an idle device to an idle device."""
    seconds = []
    for step, batch in enumerate(batches, start=first):
        begun = record.finish(batch.spans.device)
        train_step.begin({"": batch}, step)
        seconds.append(record.finish(batch.spans.device) - begun)
    return seconds


def checksum(train_step: TrainStep) -> str:
    """SHA-256 of the encoder's parameters."""
    digest = hashlib.sha256()
    for parameter in train_step.encoder.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
