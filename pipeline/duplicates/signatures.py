"""Signatures: short arrays whose share of equal slots estimates the Jaccard similarity of two documents.

Fast similarity sketching (Dahlgaard, Knudsen, Thorup, FOCS 2017): as in MinHash, P(slot equal) = Jaccard similarity and
slots are nearly independent, but a shingle is hashed once or a few times, not once a slot. In each of a few rounds
every shingle falls into one slot, which keeps the least value. Values of later rounds are larger, so that a full
signature needs no further round. A slot that is then still empty, as in short documents, takes the least hash of all
shingles.
"""

import numpy as np
from numpy.typing import NDArray

from declutr.common.seeding import key_for
from declutr.pipeline.duplicates.config import NearConfig
from declutr.pipeline.duplicates.shingles import shingles
from declutr.pipeline.filters.words import U64, mix

_ROUNDS = 3
_VALUE_BITS = 30  # of a slot's 32; the round is in the two above
_VALUE_MASK = np.uint64((1 << _VALUE_BITS) - 1)
_HALF = np.uint64(32)
_EMPTY = np.uint32(0xFFFFFFFF)
_FEW = 2048


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
