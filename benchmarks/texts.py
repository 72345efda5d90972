"""Made-up sentences and pairs in the shards' schema, and the trainer's step of SimCSE, SCD and SCL on them."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks import models, packed
from common import seeding
from pipeline.readers.corpus import ID_BYTES
from pipeline.shards.content import LABELS, NO_LABEL
from trainer.objectives.scd.config import ScdConfig
from trainer.objectives.scl.config import SclConfig
from trainer.objectives.simcse.config import SimcseConfig
from trainer.objectives.text_settings import TextObjectiveConfig

OBJECTIVES: dict[str, TextObjectiveConfig] = {
    "simcse": SimcseConfig(),
    "scd": ScdConfig(rates=(0.05, 0.15), decorrelation_weight=0.005, off_diagonal_weight=0.013),
    "scl": SclConfig(max_tokens=128),
}
"""Settings of the papers' BERT runs."""
ROWS = {"simcse": 64, "scd": 64, "scl": 21}
"""Rows of a step: sentences, or premises with a hypothesis of each label."""
# Lengths without specials, in tokens of bert-base-uncased, at 0%, 5%, ..., 100% of 4,000 texts each: sentences of the
# English Wikipedia, and premises and hypotheses of SNLI's development set with the counterfactually augmented NLI data.
_SENTENCE = (5, 9, 11, 13, 14, 15, 16, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 29, 30, 33, 51)
_PREMISE = (2, 7, 8, 9, 10, 11, 11, 12, 13, 13, 14, 15, 16, 17, 18, 19, 20, 22, 24, 28, 64)
_HYPOTHESIS = (2, 4, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9, 10, 11, 12, 13, 15, 37)
_FIRST_ORDINARY = 4  # lower ids are RoBERTa's special tokens


@dataclass(frozen=True)
class TextWorkload(packed.Workload):
    """Encoder, rows of short texts, and step of a text objective; `spans` has no effect."""

    def rows(self, first: int, count: int) -> pa.Table:
        """Rows [first, first + count) of sentences, or of premises with their hypotheses."""
        pairs = "sentences" not in self.objective.reads
        return text_rows(first, count, pairs, models.vocabulary(self.size).size, self.seed)


def text_rows(first: int, count: int, pairs: bool, vocab_size: int, seed: int) -> pa.Table:
    """Rows [first, first + count) of an endless corpus.

    A row is a sentence or, with `pairs`, a premise with a hypothesis of each label. Lengths are drawn from those of
    real texts, tokens uniformly from the vocabulary without special ids.
    """
    numbers = np.arange(first, first + count, dtype=np.uint64)
    lengths = [_PREMISE, *[_HYPOTHESIS] * len(LABELS)] if pairs else [_SENTENCE]
    labels = [NO_LABEL, *range(len(LABELS))] if pairs else [NO_LABEL]
    zeros = np.zeros_like(numbers)
    shares = seeding.unit(seeding.blocks(seed, "benchmark texts", numbers, zeros, zeros))
    points = [np.linspace(0, 1, len(known)) for known in lengths]
    sizes = np.stack(
        [np.interp(shares[:, place], points[place], known) for place, known in enumerate(lengths)], axis=1
    ).astype(np.int64)
    columns: dict[str, list[Any]] = {name: [] for name in ("id", "tokens", "starts", "labels", "num_tokens")}
    for key, of_row in zip(np.split(numbers, count), sizes, strict=True):
        total = int(of_row.sum())
        drawn = seeding.words(seed, "benchmark tokens", key, np.zeros_like(key), total)[0]
        name = f"{seed} {int(key[0])}".encode()
        columns["id"].append(hashlib.blake2b(name, digest_size=ID_BYTES).digest())
        columns["tokens"].append(
            (_FIRST_ORDINARY + seeding.unit(drawn) * (vocab_size - 1 - _FIRST_ORDINARY)).astype(np.int64)
        )
        columns["starts"].append(np.cumsum(of_row) - of_row)
        columns["labels"].append(labels)
        columns["num_tokens"].append(total)
    types = {
        "id": pa.binary(ID_BYTES),
        "tokens": pa.list_(pa.uint16() if vocab_size <= 2**16 else pa.uint32()),
        "starts": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int8()),
        "num_tokens": pa.int64(),
    }
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})
