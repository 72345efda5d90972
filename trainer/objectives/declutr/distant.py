"""Pairs of spans of one document that are far from each other, for the held-out scores (decision 19). Numpy only.

Like other spans, they are drawn by key and placed deterministically (trainer/objectives/declutr/spans.py). Legend: n
documents.
"""

import numpy as np
from numpy.typing import NDArray

from declutr.trainer.objectives.declutr.spans import I64, Draws, Spans

DISTANT = "distant spans"
"""Purpose under which the random numbers of distant spans are drawn."""


def place_distant(
    draws: Draws, num_tokens: I64, lengths: tuple[I64, I64], distance: int
) -> tuple[Spans, NDArray[np.bool_]]:
    """Places an anchor and a positive in each document, with at least `distance` tokens between them.

    The remaining tokens are distributed at random before, between and after the two spans, and their order is random
    too. If a document is too short for the distance, one span starts the document and the other ends it.

    Args:
        draws: the random numbers.
        num_tokens: `(n,)` lengths of the documents.
        lengths: `(n,)` tokens of the anchors and `(n,)` of the positives; each document has room for both.
        distance: wanted number of tokens between the two.

    Returns:
        The spans, one anchor and one positive a document, and `(n,)` true where the distance is reached.
    """
    anchor, positive = lengths
    room = num_tokens - anchor - positive
    between = np.minimum(distance, room)
    places = room - between + 1
    anchor_draw, positive_draw = draws.anchor_starts[:, 0], draws.positive_starts[:, 0, 0]
    anchor_start, positive_start = ((drawn * places).astype(np.int64) for drawn in (anchor_draw, positive_draw))
    first = anchor_draw < positive_draw  # then the anchor's start is not after the positive's
    anchor_start += np.where(first, 0, positive + between)
    positive_start += np.where(first, anchor + between, 0)
    spans = Spans(
        anchors=np.stack([anchor_start, anchor_start + anchor], axis=-1)[:, None],
        positives=np.stack([positive_start, positive_start + positive], axis=-1)[:, None, None],
        present=np.ones((len(num_tokens), 1), np.bool_),
    )
    return spans, room >= distance
