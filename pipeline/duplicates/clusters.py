"""The decision which documents are kept, from the pairs of similar documents.

Similarity is not transitive: A ~ B and B ~ C do not imply A ~ C. Dropping all but one document of a connected component
would drop C because of A, which may be quite different, and long chains (versions of a page, a template with changing
contents) would collapse into one document. So the documents are visited in the order of the corpus, and a document is
dropped only if it pairs with an earlier document that was kept. B is dropped because of A; C, whose only pair is with
B, is kept. Every dropped document thus has a kept document that is similar to it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.pipeline.duplicates.documents import I64
from declutr.pipeline.duplicates.pairs import DuplicatePairs

_OPEN, _KEPT, _DROPPED = 0, 1, 2


@dataclass(frozen=True)
class Decisions:
    """The documents to drop, by number, ascending; all arrays `(num_dropped,)`."""

    dropped: I64
    kept: I64
    """The earliest kept document that is similar to the dropped one."""
    similarity: NDArray[np.float32]
    exact: NDArray[np.bool_]
    """True where the text equals that of the kept document."""
    cluster_size: I64
    """Number of documents that the kept one represents, including itself."""


def decide(pairs: DuplicatePairs) -> Decisions:
    """Drops every document that pairs with an earlier kept one.

    Of equal texts only the first has near pairs (pipeline/duplicates/pairs.py); the others follow its decision.
    """
    near = ~pairs.exact
    dropped, kept, similarity = _near(pairs.later[near], pairs.earlier[near], pairs.similarity[near])
    twins, originals = pairs.later[pairs.exact], pairs.earlier[pairs.exact]
    if len(dropped):
        place = np.minimum(np.searchsorted(dropped, originals), len(dropped) - 1)
        gone = dropped[place] == originals
        twin_kept = np.where(gone, kept[place], originals)
        twin_similarity = np.where(gone, similarity[place], np.float32(1))
    else:
        gone = np.zeros(len(twins), np.bool_)
        twin_kept, twin_similarity = originals, np.ones(len(twins), np.float32)
    all_dropped = np.concatenate([dropped, twins])
    all_kept = np.concatenate([kept, twin_kept])
    order = np.argsort(all_dropped, kind="stable")
    all_kept = all_kept[order]
    leaders, sizes = np.unique(all_kept, return_counts=True)
    return Decisions(
        dropped=all_dropped[order],
        kept=all_kept,
        similarity=np.concatenate([similarity, twin_similarity])[order],
        exact=np.concatenate([np.zeros(len(dropped), np.bool_), ~gone])[order],
        cluster_size=(sizes[np.searchsorted(leaders, all_kept)] + 1).astype(np.int64),
    )


def _near(later: I64, earlier: I64, similarity: NDArray[np.float32]) -> tuple[I64, I64, NDArray[np.float32]]:
    """Dropped documents, the kept documents that replace them, and their similarity, from sorted near pairs.

    The rule is sequential; here it runs in rounds over all documents at once. A document without open or kept earlier
    partners is kept; a document with a kept earlier partner is dropped; settled pairs are removed.
    """
    documents = np.unique(np.concatenate([later, earlier]))
    second, first = np.searchsorted(documents, later), np.searchsorted(documents, earlier)
    state = np.full(len(documents), _OPEN, np.int8)
    waiting = np.zeros(len(documents), np.bool_)
    open_second, open_first = second, first
    while len(open_second):
        waiting[open_second] = True
        state[open_first[~waiting[open_first]]] = _KEPT
        waiting[open_second] = False
        state[open_second[state[open_first] == _KEPT]] = _DROPPED
        unsettled = (state[open_second] == _OPEN) & (state[open_first] == _OPEN)
        open_second, open_first = open_second[unsettled], open_first[unsettled]
    state[state == _OPEN] = _KEPT
    reasons = np.flatnonzero((state[second] == _DROPPED) & (state[first] == _KEPT))
    dropped, where = np.unique(later[reasons], return_index=True)
    chosen = reasons[where]
    return dropped, earlier[chosen], similarity[chosen]
