"""Spans of documents packed one after the other, with their special tokens and dropout keys."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """Size and special ids of a tokenizer.

    Attributes:
        size: number of ids.
        bos: id before every span, or None.
        eos: id after every span, or None.
        mask: id of the mask token.
        special: every special id; never selected for MLM.
    """

    size: int
    bos: int | None
    eos: int | None
    mask: int
    special: tuple[int, ...]

    @property
    def num_specials(self) -> int:
        """Number of special tokens around a span."""
        return (self.bos is not None) + (self.eos is not None)


@dataclass(frozen=True)
class Packed:
    """S spans in one row of T tokens.

    Attributes:
        ids: `(T,)` tokens, specials included.
        lengths: `(S,)` tokens of each span, specials included.
        places: `(S,)` place in `ids` of each span's first token after its leading special.
    """

    ids: I64
    lengths: I64
    places: I64


def pack(tokens: NDArray[np.integer], sources: I64, content: I64, vocabulary: Vocabulary) -> Packed:
    """Packs spans.

    Args:
        tokens: tokens of all documents, one after the other.
        sources: `(S,)` place of each span's first token in `tokens`.
        content: `(S,)` tokens of each span, without specials.
        vocabulary: ids of the specials.
    """
    lengths = content + vocabulary.num_specials
    ends = np.cumsum(lengths)
    starts = ends - lengths
    ids = np.empty(int(lengths.sum()), np.int64)
    if vocabulary.bos is not None:
        ids[starts] = vocabulary.bos
    if vocabulary.eos is not None:
        ids[ends - 1] = vocabulary.eos
    places = starts + (vocabulary.bos is not None)
    # A slice per span: an index array per token would take longer and, for thousands of documents, much memory.
    for start, source, size in zip(places.tolist(), sources.tolist(), content.tolist(), strict=True):
        ids[start : start + size] = tokens[source : source + size]
    return Packed(ids, lengths, places)


def dropout_words(seed: int, keys: seeding.U64, epochs: seeding.U64, numbers: I64) -> NDArray[np.int32]:
    """`(S,)` dropout keys of spans; spans with different arguments drop independently.

    Args:
        seed: seed of the run.
        keys: `(S,)` key of each span's document.
        epochs: `(S,)` epoch in which it is read.
        numbers: `(S,)` number of the span, unique among those of its document.
    """
    drawn = seeding.blocks(seed, "dropout", keys, epochs, numbers.astype(np.uint64))
    return np.ascontiguousarray(drawn[:, 0]).view(np.int32)
