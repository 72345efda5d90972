"""The words of a text as numbers: 64-bit hashes, lengths and classes, computed by numpy a piece at a time.

A word's hash is a polynomial over random values of its code points, modulo 2**64,

    h(w) = mix(sum_i T[w_i] * B**i  +  len(w) * L),   B odd, T[c] = splitmix64(c),

so that one product and one `add.reduceat` hash all words of a piece. Unlike Python's `hash`, it is the same on every
machine and in every process. n-grams are hashed the same way over their words' hashes.
"""

import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Codes = NDArray[np.uint8] | NDArray[np.uint32]

_PIECE_CHARACTERS = 1 << 15  # a few arrays of this length fit the processor's cache
_BASE = 0x9E3779B97F4A7C15  # odd, so that it is invertible modulo 2**64
_LENGTH = np.uint64(0xD6E8FEB86659FD93)  # the multiplier of degski's mixer
_NGRAM = np.uint64(0xA0761D6478BD642F)  # wyhash's first constant
_CLASSES = 0x20000  # size of the table of classes; code points above are ideographs, never marks or whitespace
_SPACE, _LETTER, _MARK = 1, 2, 4  # classes, as bits: the classes of a word's characters are joined by `|`
_ASCII_MARKS = string.punctuation.encode()  # all of them, and no other ASCII character, are in P or S


@dataclass(frozen=True, slots=True)
class WordHashes:
    """The words of a text in order: three arrays of shape `(n,)`."""

    hashes: U64
    lengths: NDArray[np.int64]  # number of characters
    with_letter: NDArray[np.bool_]  # True for words with at least one letter of any script

    def __len__(self) -> int:
        return len(self.hashes)


def hash_words(text: str) -> WordHashes:
    """The whitespace-separated words of any string."""
    pieces = [_hash_piece(codes) for codes in _pieces(text, fold=False)]
    hashes = [np.empty(0, np.uint64), *(hashes for hashes, _, _, _ in pieces)]
    lengths = [np.empty(0, np.int64), *(stops - starts for _, starts, stops, _ in pieces)]
    letters = [np.empty(0, np.bool_), *(_with_letter(starts, classes) for _, starts, _, classes in pieces)]
    return WordHashes(np.concatenate(hashes), np.concatenate(lengths), np.concatenate(letters))


def hash_folded(text: str) -> U64:
    """Hashes of the words of a text in lower case, punctuation marks and symbols (Unicode P and S) deleted, `(n,)`.

    As in appendix C of the GPT-3 paper, `Don't` is the word `dont`, and a dash between spaces is not a word.
    """
    return np.concatenate([np.empty(0, np.uint64), *(_hash_piece(codes)[0] for codes in _pieces(text, fold=True))])


def folded_words(text: str) -> list[str]:
    """The words that `hash_folded` hashes."""
    words: list[str] = []
    for codes in _pieces(text, fold=True):
        words += codes.astype(np.uint32).tobytes().decode("utf-32-le", "surrogatepass").split()
    return words


def extend_ngrams(hashes: U64, words: U64) -> U64:
    """Hashes of (n+1)-grams from those of the n-grams at the same places and of the words that follow them, `(n,)`."""
    return (hashes * _NGRAM) ^ (words + (hashes >> np.uint64(32)))


def mix(values: U64) -> U64:
    """The finaliser of splitmix64 (Steele et al. 2014): a bijection of 64-bit words that mixes all bits."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


@lru_cache
def powers(base: int, count: int) -> tuple[U64, U64]:
    """base**i and base**-i modulo 2**64 for an odd base, `(count,)` each."""
    tables = []
    for factor in (base, pow(base, -1, 1 << 64)):
        table = np.full(count, factor, np.uint64)
        table[0] = 1
        tables.append(np.multiply.accumulate(table))
    return tables[0], tables[1]


@lru_cache(maxsize=1)
def _tables() -> tuple[U64, NDArray[np.uint8]]:
    """Values and classes of code points, built once a process in about 30 ms."""
    classes = np.zeros(_CLASSES, np.uint8)
    for code in range(_CLASSES):
        character = chr(code)
        if character.isspace():
            classes[code] = _SPACE
        elif character.isalpha():
            classes[code] = _LETTER
        elif unicodedata.category(character)[0] in "PS":
            classes[code] = _MARK
    classes[-1] = _LETTER  # U+1FFFF is not a character: its entry is used for all code points above
    values = mix(np.arange(1, 0x110001, dtype=np.uint64) * np.uint64(_BASE))
    values[:_CLASSES][classes == _SPACE] = 0
    return values, classes


def _pieces(text: str, fold: bool) -> Iterator[Codes]:
    """The code points of a text in pieces; a piece ends at whitespace if it holds any."""
    start = 0
    while start < len(text):
        stop = start + _PIECE_CHARACTERS
        if stop < len(text):
            space = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop))
            stop = space + 1 if space > start else stop
        yield _code_points(text[start:stop], fold)
        start = stop


def _code_points(piece: str, fold: bool) -> Codes:
    """Code points, with `fold` in lower case and without marks: bytes if all are ASCII (faster), else 32-bit words."""
    if piece.isascii():
        raw = piece.encode()
        return np.frombuffer(raw.lower().translate(None, _ASCII_MARKS) if fold else raw, np.uint8)
    if not fold:
        return np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), np.uint32)
    codes = np.frombuffer(piece.lower().encode("utf-32-le", "surrogatepass"), np.uint32)
    return codes[_classes(codes) != _MARK]


def _classes(codes: Codes) -> NDArray[np.uint8]:
    """Classes of characters (whitespace, letter, mark or none), `(n,)`."""
    return _tables()[1][codes if codes.itemsize == 1 else np.minimum(codes, _CLASSES - 1)]


def _hash_piece(codes: Codes) -> tuple[U64, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Hashes, starts and stops of the words of a piece, and the classes of its characters."""
    classes = _classes(codes)
    inside = np.zeros(len(codes) + 2, np.bool_)  # outside at both ends, so each word has two edges
    np.not_equal(classes, _SPACE, out=inside[1:-1])
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, stops = edges[0::2], edges[1::2]
    if not len(starts):
        return np.empty(0, np.uint64), starts, stops, classes
    factors, inverses = powers(_BASE, 3 * _PIECE_CHARACTERS)  # lower case is up to three times as long
    values = _tables()[0][codes]
    values *= factors[: len(codes)]
    sums = np.add.reduceat(values, starts)  # whitespace after a word has value 0 and adds nothing
    sums *= inverses[starts]  # equal words have equal hashes wherever they stand
    return mix(sums + (stops - starts).astype(np.uint64) * _LENGTH), starts, stops, classes


def _with_letter(starts: NDArray[np.int64], classes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """A mask of words with a letter, `(n,)`; `reduceat` adds the whitespace after a word, which has none."""
    if not len(starts):
        return np.empty(0, np.bool_)
    return (np.bitwise_or.reduceat(classes, starts) & _LETTER) != 0
