"""Word n-grams of a text as 64-bit hashes, in a few passes of numpy over its characters, and signatures of them.

A word is a run of letters, digits and combining marks in lower case; other characters separate words. In scripts
written without spaces (Han, kana, Thai, Lao, Burmese, Khmer) every character is a separate word.

Signatures are short arrays whose share of equal slots estimates the Jaccard similarity of two documents. Fast
similarity sketching (Dahlgaard, Knudsen, Thorup, FOCS 2017): as in MinHash, P(slot equal) = Jaccard similarity and
slots are nearly independent, but a shingle is hashed once or a few times, not once a slot. In each of a few rounds
every shingle falls into one slot, which keeps the least value. Values of later rounds are larger, so that a full
signature needs no further round. A slot that is then still empty, as in short documents, takes the least hash of all
shingles.
"""

import hashlib
import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from declutr.common.seeding import key_for
from declutr.pipeline.duplicates.config import NearConfig
from declutr.pipeline.filters.words import U64, mix, powers

_CHUNK = 1 << 15  # characters at a time, so that intermediate arrays stay in the processor's cache
_BASE = key_for(0, "duplicates: base") | 1  # odd, so that it has an inverse modulo 2**64
_WORD_BASE = np.uint64(key_for(0, "duplicates: word base") | 1)
_SPACELESS = (
    (0x0E00, 0x0F00),  # Thai, Lao
    (0x1000, 0x10A0),  # Burmese
    (0x1780, 0x1800),  # Khmer
    (0x3040, 0x3100),  # Hiragana, Katakana
    (0x31F0, 0x3200),
    (0x3400, 0x4DC0),  # Han
    (0x4E00, 0xA000),
    (0xF900, 0xFB00),
    (0x20000, 0x32400),
)


def shingles(text: str, ngram_words: int) -> U64:
    """Hashes of all runs of `ngram_words` words, `(num_words - ngram_words + 1,)`, in order, including repeats.

    A text with fewer words has one shingle of all its words; a text without words has one shingle, the text itself.
    The hashes are the same in every process and on every machine.
    """
    words = word_hashes(text)
    if len(words) == 0:
        digest = hashlib.blake2b(" ".join(text.split()).encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return np.frombuffer(digest, "<u8").astype(np.uint64)
    size = min(ngram_words, len(words))
    count = len(words) - size + 1
    hashes = words[:count].copy()
    for place in range(1, size):
        hashes *= _WORD_BASE
        hashes += words[place : place + count]
    return mix(hashes)


def word_hashes(text: str) -> U64:
    """A hash for each word of the text, `(num_words,)`."""
    letters, spaceless = _tables()
    ascii_only = text.isascii()
    codes = (
        np.frombuffer(text.encode("ascii"), np.uint8)
        if ascii_only
        else np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    )
    parts: list[U64] = []
    start = 0
    while start < len(codes):
        chunk = codes[start : start + _CHUNK]
        values = letters.take(chunk)
        if start + len(chunk) < len(codes):
            # A word is hashed whole: the chunk ends after its last separator, unless it has none.
            separators = np.flatnonzero(values == 0)
            if len(separators):
                chunk, values = chunk[: separators[-1] + 1], values[: separators[-1] + 1]
        parts.append(_hash_words(values, None if ascii_only else spaceless.take(chunk)))
        start += len(chunk)
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _hash_words(values: U64, alone: NDArray[np.bool_] | None) -> U64:
    """Hashes of the words in a stretch of letter values, separated by 0: sum of letter * base^place, mixed."""
    first = values != 0  # here every letter; below only the first of each word
    continues = first[1:] & first[:-1]
    if alone is not None:
        continues &= ~(alone[1:] | alone[:-1])
    first[1:] ^= continues
    starts = np.flatnonzero(first)
    if not len(starts):
        return np.empty(0, np.uint64)
    factors, inverses = powers(_BASE, _CHUNK)
    sums = np.add.reduceat(values * factors[: len(values)], starts)  # separators have value 0 and add nothing
    sums *= inverses.take(starts)
    return mix(sums)


@lru_cache(maxsize=1)
def _tables() -> tuple[U64, NDArray[np.bool_]]:
    """A random value for the lower-case form of each code point (0: separator); a mask of one-character words."""
    lower = np.zeros(0x110000, np.uint64)
    for code in range(0x32400):  # above: unassigned, tags and private use
        kind = unicodedata.category(chr(code))[0]
        if kind in "LMN":
            lower[code] = ord(chr(code).lower()[0]) if kind == "L" else code
    salt = np.uint64(key_for(0, "duplicates: letters"))
    letters = np.where(lower > 0, mix(lower ^ salt) | np.uint64(1), np.uint64(0))
    alone = np.zeros(len(lower), np.bool_)
    for first, last in _SPACELESS:
        alone[first:last] = letters[first:last] != 0
    return letters, alone


_ROUNDS = 3  # rounds in which every shingle falls into one slot
_VALUE_BITS = 30  # of a slot's 32; the round is in the two above
_VALUE_MASK = np.uint64((1 << _VALUE_BITS) - 1)
_HALF = np.uint64(32)  # bits of half a hash
_EMPTY = np.uint32(0xFFFFFFFF)
_FEW = 2048  # most shingles for which all rounds run at once


# Not rensa, which is faster: its signatures changed with a version, and ours stay on disk between restarts.
class Signer:
    """Signs texts; the same text has the same signature in every process and on every machine."""

    def __init__(self, config: NearConfig) -> None:
        self.config = config
        keys = [key_for(number, "duplicates: round") for number in range(_ROUNDS)]
        self._round_keys = np.array(keys, np.uint64)[:, None]
        self._round_bits = (np.arange(_ROUNDS, dtype=np.uint32) << np.uint32(_VALUE_BITS))[:, None]
        places = np.arange(config.num_slots, dtype=np.uint64)
        self._slot_keys = mix(places + np.uint64(key_for(0, "duplicates: slots")))

    def sign(self, text: str) -> NDArray[np.uint32]:
        """The signature of a text, `(num_slots,)`."""
        return self.sketch(shingles(text, self.config.ngram_words))

    def sketch(self, hashes: U64) -> NDArray[np.uint32]:
        """The signature of a set of shingles, given as `(n,)` hashes in any order, n >= 1."""
        num_slots = np.uint64(self.config.num_slots)
        slots = np.full(self.config.num_slots, _EMPTY, np.uint32)
        # For few shingles all rounds run at once, because calls cost more than computation; the result is the same.
        step = _ROUNDS if len(hashes) <= _FEW else 1
        for number in range(0, _ROUNDS, step):
            drawn = mix((hashes ^ self._round_keys[number : number + step]).reshape(-1))
            # The upper half of a hash, as a fraction of 2**32, gives the slot; the lower half gives the value.
            places = ((drawn >> _HALF) * num_slots >> _HALF).astype(np.intp)
            values = (drawn & _VALUE_MASK).astype(np.uint32).reshape(step, -1)
            values |= self._round_bits[number : number + step]
            np.minimum.at(slots, places, values.reshape(-1))
            if int(slots.max()) < (number + step) << _VALUE_BITS:
                return slots
        for slot in np.flatnonzero(slots == _EMPTY):
            drawn = mix(hashes ^ self._slot_keys[slot]) & _VALUE_MASK
            slots[slot] = int(drawn.min()) | _ROUNDS << _VALUE_BITS
        return slots


def band_keys(signatures: NDArray[np.uint32], config: NearConfig) -> U64:
    """A key for each band of each signature: `(n, num_slots)` in, `(n, bands)` out. Different bands share no keys."""
    grouped = signatures.reshape(len(signatures), config.bands, config.rows).astype(np.uint64)
    bands = np.arange(config.bands, dtype=np.uint64) + np.uint64(key_for(0, "duplicates: bands"))
    keys = np.broadcast_to(mix(bands), grouped.shape[:2]).copy()
    for row in range(config.rows):
        keys = mix(keys ^ grouped[:, :, row])
    return keys
