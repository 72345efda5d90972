"""Measures of retrieval for each query. Legend: Q queries, G texts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
CUTOFFS = (1, 5, 10)
MEASURES = (*(f"recall@{k}" for k in CUTOFFS), "mrr", "ndcg@10")


def positions(scores: NDArray[np.floating], relevant: Sequence[int]) -> F64:
    """Positions from 1 of a query's relevant texts in the order of their scores; a tie counts half.

    Args:
        scores: `(G,)` of the query.
        relevant: numbers of the relevant texts.
    """
    own = np.sort(scores[list(relevant)])[::-1]
    others = np.delete(scores, list(relevant))
    above = (others[None] > own[:, None]).sum(axis=1) + 0.5 * (others[None] == own[:, None]).sum(axis=1)
    found: F64 = above + np.arange(1, len(own) + 1)
    return found


def measures(scores: NDArray[np.floating], relevant: Sequence[Sequence[int]]) -> F64:
    """`(Q, 5)` values of `MEASURES` for each query.

    recall@k: share of the relevant texts among the first k. mrr: 1 / position of the first relevant text. ndcg@10:
    sum of 1 / log2(1 + position) over the relevant texts among the first 10, divided by its largest possible value
    (Järvelin and Kekäläinen 2002).

    Args:
        scores: `(Q, G)`.
        relevant: numbers of the relevant texts of each query, at least one.
    """
    rows = np.empty((len(relevant), len(MEASURES)))
    for row, (values, wanted) in enumerate(zip(scores, relevant, strict=True)):
        places = positions(values, wanted)
        shares = [float((places <= k).mean()) for k in CUTOFFS]
        gain = float((1 / np.log2(1 + places[places <= 10])).sum())
        best = float((1 / np.log2(1 + np.arange(1, min(len(places), 10) + 1))).sum())
        rows[row] = [*shares, 1 / places[0], gain / best]
    return rows
