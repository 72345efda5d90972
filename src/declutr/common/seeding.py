"""Randomness as an argument: every draw is a pure function of (seed, purpose, position).

Philox4x32-10 (Salmon et al., SC 2011: "Parallel random numbers: as easy as 1, 2, 3"), vectorised over positions, so
that one call makes a million draws for a thousand documents and no generator state is carried between calls.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))  # these and `_WEYL` are those of Philox4x32
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10  # 7 pass the tests of the paper; 10 are its default
_CHUNK = 4096  # counters processed at once: six arrays of 32 KiB

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


def key_for(seed: int, purpose: str) -> int:
    """64-bit key of a stream of draws. Two purposes never share a stream."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}".encode(), digest_size=8).digest()  # \0: seed 1, "2x" is not 12, "x"
    return int.from_bytes(digest, "little")


def philox(key: int, counters: tuple[U64, U64, U64, U64]) -> U32:
    """Philox4x32-10 of each counter: four words below 2**32 in, `(n, 4)` uniform 32-bit words out."""
    drawn = np.empty((len(counters[0]), 4), np.uint32)
    for start in range(0, len(drawn), _CHUNK):
        # The rounds work in place on copies, so that everything stays in the processor's cache.
        c0, c1, c2, c3 = (np.array(counter[start : start + _CHUNK], np.uint64) for counter in counters)
        first, second = np.empty_like(c0), np.empty_like(c0)
        k0, k1 = key & 0xFFFFFFFF, key >> 32
        for _ in range(_ROUNDS):
            np.multiply(c0, _MULTIPLIERS[0], out=first)
            np.multiply(c2, _MULTIPLIERS[1], out=second)
            np.right_shift(second, _SHIFT, out=c0)
            c0 ^= c1
            c0 ^= np.uint64(k0)
            np.bitwise_and(second, _LOW, out=c1)
            np.right_shift(first, _SHIFT, out=c2)
            c2 ^= c3
            c2 ^= np.uint64(k1)
            np.bitwise_and(first, _LOW, out=c3)
            k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
        for word, column in enumerate((c0, c1, c2, c3)):
            drawn[start : start + _CHUNK, word] = column
    return drawn


def blocks(
    seed: int,  # the run's seed
    purpose: str,  # what the draws are for, for example "spans"
    major: U64,  # `(n,)` 64-bit positions, for example document keys
    minor: U64,  # `(n,)` positions below 2**32, for example epochs
    index: U64,  # `(n,)` positions below 2**32, for example token numbers
) -> U32:
    """Four uniform 32-bit words for each position, `(n, 4)`: row i depends on (seed, purpose, position i) alone."""
    return philox(key_for(seed, purpose), (index, minor, major & _LOW, major >> _SHIFT))


def words(seed: int, purpose: str, major: U64, minor: U64, count: int) -> U32:
    """Uniform 32-bit words, `(n, count)`: `count` words a position; a longer row starts with the shorter one."""
    per_row = -(-count // 4)
    index = np.tile(np.arange(per_row, dtype=np.uint64), len(major))
    drawn = blocks(seed, purpose, np.repeat(major, per_row), np.repeat(minor, per_row), index)
    return drawn.reshape(len(major), per_row * 4)[:, :count]


def unit(drawn: U32) -> NDArray[np.float64]:
    """32-bit words as floats in [0, 1): exact multiples of 2**-32, so that floor(u * n) is always below n."""
    return drawn.astype(np.float64) * 2.0**-32


def torch_seed(seed: int, purpose: str, *position: int | str) -> int:
    """A 63-bit seed for a `torch.Generator` or `torch.random.fork_rng` block at this position."""
    text = "\0".join([str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1  # torch takes 63 bits
