"""The corpus that each position of the training stream reads: shares exact to less than one row at any position.

The order of the corpora repeats after as many rows as the shares add up to. Within a period, row k of a corpus with the
share w is due between the positions floor((k - 1) / w) and ceil(k / w), and of the rows that are due the one with the
earliest end is read (earliest deadline first; Baruah and others, Algorithmica 1996: such an order exists, and after
every N rows a corpus was read less than one row more or less than w N times).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MOST_TURNS = 100_000
"""Longest period in rows: its table is held in memory by every process that reads."""


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in the ratio of positive weights, read as the decimals in which they are written."""
    exact = [Fraction(str(weight)) for weight in weights]
    scaled = [int(fraction * math.lcm(*(other.denominator for other in exact))) for fraction in exact]
    divisor = math.gcd(*scaled)
    return tuple(share // divisor for share in scaled)


@lru_cache
def turns(shares: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`(period,)` corpus that each position of a period reads, and how many of its rows were read before in it."""
    period = sum(shares)
    read = [0] * len(shares)
    later = [(0, corpus) for corpus in range(len(shares))]
    due = list[tuple[int, int]]()
    corpora, places = np.empty(period, np.int64), np.empty(period, np.int64)
    for position in range(period):
        while later and later[0][0] <= position:
            corpus = heapq.heappop(later)[1]
            heapq.heappush(due, (-(-(read[corpus] + 1) * period // shares[corpus]), corpus))
        corpus = heapq.heappop(due)[1]
        corpora[position], places[position] = corpus, read[corpus]
        read[corpus] += 1
        if read[corpus] < shares[corpus]:
            heapq.heappush(later, (read[corpus] * period // shares[corpus], corpus))
    return corpora, places
