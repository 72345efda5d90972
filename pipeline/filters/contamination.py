"""Search for text of evaluation sets in documents, by n-grams of words as in appendix C of the GPT-3 paper.

Brown et al. 2020 (arXiv:2005.14165): words in lower case without punctuation, n = 13; a document is contaminated if it
shares an n-gram with an evaluation set. Sentences are often shorter than 13 words, so an example of 8 to 12 words is
searched as a whole. Shorter ones are common phrases and are left out (appendix C uses no n below 8 either).

The search computes the hashes of a document's words and a rolling hash over the first 8 words of each possible entry
(its head; no entry is shorter). A bitmap of heads lets one place in sixteen pass, and only these get longer hashes and
a binary search. A hit is verified by BLAKE2b of its words, so that a false match needs two independent 64-bit hashes to
agree: probability 2**-128 a pair, about 3e-23 for all pairs of 1e10 n-grams of a corpus and 1e6 entries.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import Strict
from declutr.pipeline.filters.words import U64, extend_ngrams, folded_words, hash_folded, mix

SCHEMA_VERSION = "1"
_SHORTEST_WHOLE = 8
_BITMAP_LOAD = 16


class Contamination(Strict):
    """Evaluation sets to search for, and the treatment of documents that hold text of them."""

    paths: list[str] = Field(min_length=1)
    """Files and folders of evaluation sets."""
    ngram: int = Field(default=13, ge=2, le=64)
    """Words in a row that make a match."""
    min_example_words: int = Field(default=_SHORTEST_WHOLE, ge=1)
    """Examples shorter than `ngram` are searched as a whole from this many words on."""
    action: Literal["report", "drop"] = "report"
    """report: keep the document and record the match in the ledger. drop: drop it."""
    max_matches: int = Field(default=0, ge=0)
    """Different n-grams of evaluation sets that an uncontaminated document may hold."""


@dataclass(frozen=True, slots=True)
class Match:
    """Text that a document shares with evaluation sets."""

    num_ngrams: int
    """Number of different n-grams or whole examples."""
    name: str
    """Evaluation set of the first one."""
    words: str
    """The first one, as folded words."""


class ContaminationIndex:
    """The file that `declutr.pipeline.filters.evaluation_sets.build_index` writes, mapped into memory."""

    def __init__(self, path: Path) -> None:
        """Opens an index.

        Raises:
            ValueError: the file was written by another version.
        """
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        if metadata.get("version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path} is a contamination index of version {metadata.get('version')!r}, but this code reads "
                f"version {SCHEMA_VERSION!r}; delete it, and it is built again"
            )
        self._names = metadata["names"].split("\n")
        self._lengths = sorted(map(int, metadata["lengths"].split()))
        self._keys: U64 = _column(table, "key")
        self._checks: U64 = _column(table, "check")
        self._sets = _column(table, "set")
        self._head_words = int(metadata["head"])
        self._shift = np.uint64(64 - max(13, (len(self._keys) * _BITMAP_LOAD).bit_length()))
        self._bitmap = _bitmap(mix(_column(table, "head")), self._shift)

    def find(self, text: str) -> Match | None:
        """Finds text shared with the evaluation sets. The cost grows with the text's n-grams, not with the index."""
        words = hash_folded(text)
        heads = ngram_hashes(words, self._head_words)
        bits = mix(heads) >> self._shift
        marked = self._bitmap[bits >> np.uint64(3)] >> (bits & np.uint64(7)).astype(np.uint8) & 1
        places = np.flatnonzero(marked)
        hashes = heads[places]
        hits: list[tuple[int, int, int]] = []
        for length in range(self._head_words, self._lengths[-1] + 1 if self._lengths else 0):
            if length > self._head_words:
                inside = places + length <= len(words)
                places, hashes = places[inside], hashes[inside]
                hashes = extend_ngrams(hashes, words[places + length - 1])
            if length in self._lengths:
                hits += self._look_up(places, keys_of(hashes, length), length)
        return self._verify(text, sorted(hits)) if hits else None

    def _look_up(self, places: NDArray[np.int64], keys: U64, length: int) -> list[tuple[int, int, int]]:
        """Returns (place, length, row of the index) for each n-gram whose key is in the index."""
        rows = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        same = self._keys[rows] == keys
        return [(place, length, row) for place, row in zip(places[same].tolist(), rows[same].tolist(), strict=True)]

    def _verify(self, text: str, hits: list[tuple[int, int, int]]) -> Match | None:
        """The match of those hits that the second hash confirms."""
        words = folded_words(text)
        seen: set[int] = set()
        first: tuple[int, str] | None = None
        for place, length, row in hits:
            ngram = " ".join(words[place : place + length])
            if row not in seen and check_of(ngram) == int(self._checks[row]):
                seen.add(row)
                first = first or (row, ngram)
        if first is None:
            return None
        return Match(len(seen), self._names[int(self._sets[first[0]])], first[1])


def check_of(ngram: str) -> int:
    """The second hash of an n-gram: BLAKE2b of its folded words, joined by spaces."""
    return int.from_bytes(hashlib.blake2b(ngram.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def ngram_hashes(words: U64, length: int) -> U64:
    """Hashes of all n-grams of a row of words, `(max(0, len(words) - length + 1),)`."""
    hashes = words
    for index in range(1, length):
        hashes = extend_ngrams(hashes[:-1], words[index:])
    return hashes


def keys_of(hashes: U64, length: int) -> U64:
    """Keys of n-grams in the index; n-grams of different lengths have equal keys only by chance."""
    return mix(hashes + np.uint64(length))


def _column(table: pa.Table, name: str) -> NDArray[np.uint64]:
    """A column as an array, without a copy of the mapped file."""
    column: NDArray[np.uint64] = table.column(name).combine_chunks().to_numpy(zero_copy_only=False)
    return column


def _bitmap(keys: U64, shift: np.uint64) -> NDArray[np.uint8]:
    """A packed bitmap of the values that the keys' upper bits take."""
    bits = np.unique(keys >> shift)
    marks = np.zeros(1 << (64 - int(shift) - 3), np.uint8)
    np.bitwise_or.at(marks, bits >> np.uint64(3), np.left_shift(1, bits & np.uint64(7)).astype(np.uint8))
    return marks
