"""The words of a text as numbers: 64-bit hashes, lengths and classes, computed by numpy a piece at a time.

A word's hash is a polynomial over random values of its code points, modulo 2**64,

    h(w) = mix(sum_i T[w_i] * B**i  +  len(w) * L),   B odd, T[c] = splitmix64(c),

so that all words of a piece are one product and one `add.reduceat`. It is the same on every machine and in every
process, which Python's own `hash` is not. n-grams are hashed the same way over their words' hashes.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_PIECE_CHARACTERS = 1 << 16  # a few arrays of this length fit the processor's cache
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_LENGTH = np.uint64(0xD6E8FEB86659FD93)
_NGRAM = np.uint64(0xA0761D6478BD642F)
_CLASSES = 0x20000  # above lie ideographs, which are letters, and nothing that is punctuation or whitespace
_SPACE, _LETTER, _MARK = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text in order, three arrays of shape `(n,)`."""

    hashes: U64
    lengths: NDArray[np.int64]
    """Characters."""
    with_letter: NDArray[np.bool_]
    """Whether the word holds at least one letter of any script."""

    def __len__(self) -> int:
        return len(self.hashes)


def hash_words(text: str, fold: bool) -> Words:
    """The whitespace-separated words of a text.

    Args:
        text: any string.
        fold: lower case, and every punctuation mark and symbol (Unicode categories P and S) deleted first, as in
            appendix C of the GPT-3 paper: `Don't` is the word `dont`, and a dash between spaces is no word.
    """
    table = _tables()
    found = [_hash_piece(codes, table) for codes in _coded_pieces(text, fold)]
    if not found:
        return Words(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.bool_))
    hashes, lengths, with_letter = zip(*found, strict=True)
    return Words(np.concatenate(hashes), np.concatenate(lengths), np.concatenate(with_letter))


def folded_words(text: str) -> list[str]:
    """The words that `hash_words(text, fold=True)` hashes."""
    pieces = (codes.tobytes().decode("utf-32-le", "surrogatepass") for codes in _coded_pieces(text, fold=True))
    return [word for piece in pieces for word in piece.split()]


def extend_ngrams(hashes: U64, words: U64) -> U64:
    """Hashes of (n+1)-grams from those of the n-grams at the same places and of the words that follow them, `(n,)`."""
    return (hashes * _NGRAM) ^ (words + (hashes >> np.uint64(32)))


def mix(values: U64) -> U64:
    """The finaliser of splitmix64 (Steele et al. 2014): a permutation of 64-bit words in which every bit spreads."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed


@dataclass(frozen=True, slots=True)
class _Tables:
    """What the hash looks up: values and classes of code points, powers of the base and their inverses."""

    values: U64
    classes: NDArray[np.uint8]
    powers: U64
    inverses: U64


@lru_cache(maxsize=1)
def _tables() -> _Tables:
    """Made once a process, in some 30 ms."""
    classes = np.zeros(_CLASSES, np.uint8)
    for code in range(_CLASSES):
        character = chr(code)
        if character.isspace():
            classes[code] = _SPACE
        elif character.isalpha():
            classes[code] = _LETTER
        elif unicodedata.category(character)[0] in "PS":
            classes[code] = _MARK
    classes[-1] = _LETTER  # U+1FFFF is no character: its place stands for all code points above
    values = mix(np.arange(1, 0x110001, dtype=np.uint64) * np.uint64(_BASE))
    exponents = np.full(_PIECE_CHARACTERS + 1, _BASE, np.uint64)
    inverse = np.full(_PIECE_CHARACTERS + 1, pow(_BASE, -1, 1 << 64), np.uint64)
    exponents[0] = inverse[0] = 1
    return _Tables(values, classes, np.multiply.accumulate(exponents), np.multiply.accumulate(inverse))


def _coded_pieces(text: str, fold: bool) -> Iterator[NDArray[np.uint32]]:
    """The code points of a text, a piece at a time; a piece ends at whitespace if there is any in it."""
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS // 2  # lower case can be longer: at most three for one
        if stop < len(text):
            space = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop))
            stop = space + 1 if space > start else stop
        piece = text[start:stop]
        start = stop
        if not fold:
            yield np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32)
            continue
        codes = np.frombuffer(piece.lower().encode("utf-32-le", "surrogatepass"), np.uint32)
        codes = codes[_tables().classes[np.minimum(codes, _CLASSES - 1)] != _MARK]
        for begin in range(0, len(codes), _PIECE_CHARACTERS):
            yield codes[begin : begin + _PIECE_CHARACTERS]


def _hash_piece(codes: NDArray[np.uint32], table: _Tables) -> tuple[U64, NDArray[np.int64], NDArray[np.bool_]]:
    """Hashes, lengths and letters of the words of one piece."""
    classes = table.classes[np.minimum(codes, _CLASSES - 1)]
    inside = np.zeros(len(codes) + 2, np.int8)
    inside[1:-1] = classes != _SPACE
    edges = np.diff(inside)
    starts, stops = np.nonzero(edges == 1)[0], np.nonzero(edges == -1)[0]
    if not len(starts):
        return np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.bool_)
    values = table.values[codes] * table.powers[: len(codes)]
    values *= inside[1:-1].view(np.uint8)  # whitespace counts nothing
    sums = np.add.reduceat(values, starts) * table.inverses[starts]
    lengths = stops - starts
    with_letter = (np.bitwise_or.reduceat(classes, starts) & _LETTER) != 0
    return mix(sums + lengths.astype(np.uint64) * _LENGTH), lengths, with_letter
