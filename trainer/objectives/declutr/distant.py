"""Pairs of spans of one document that lie far from each other, for the held-out scores (decision 19). Numpy only.

Like other spans they are drawn by key and placed without randomness (trainer/objectives/declutr/spans.py). Legend: n
documents.
"""

import numpy as np
from numpy.typing import NDArray

from trainer.objectives.declutr.spans import I64, Draws, Spans

DISTANT = "distant spans"
"""The purpose of their draws."""


def place_distant(
    draws: Draws, num_tokens: I64, lengths: tuple[I64, I64], distance: int
) -> tuple[Spans, NDArray[np.bool_]]:
    """An anchor and a positive of each document with at least so many tokens between them.

    What the two and the distance leave of the document is spread by chance before, between and behind them, and chance
    decides which comes first. Where a document is too short for the distance, one span begins it and the other ends it.

    Args:
        draws: the random numbers.
        num_tokens: `(n,)` lengths of the documents.
        lengths: `(n,)` of the anchors and `(n,)` of the positives; a document holds both.
        distance: tokens that should be between the two.

    Returns:
        The spans, with one anchor and one positive, and `(n,)` whether the distance is between them.
    """
    anchor, positive = lengths
    room = num_tokens - anchor - positive
    between = np.minimum(distance, room)
    places = room - between + 1
    anchor_draw, positive_draw = draws.anchor_starts[:, 0], draws.positive_starts[:, 0, 0]
    anchor_start, positive_start = ((drawn * places).astype(np.int64) for drawn in (anchor_draw, positive_draw))
    first = anchor_draw < positive_draw  # then the anchor's start, of as many places, is not behind the positive's
    anchor_start += np.where(first, 0, positive + between)
    positive_start += np.where(first, anchor + between, 0)
    spans = Spans(
        anchors=np.stack([anchor_start, anchor_start + anchor], axis=-1)[:, None],
        positives=np.stack([positive_start, positive_start + positive], axis=-1)[:, None, None],
        present=np.ones((len(num_tokens), 1), np.bool_),
    )
    return spans, room >= distance
