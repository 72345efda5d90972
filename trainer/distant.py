"""Pairs of spans of one document that lie far from each other, for the held-out scores (decision 19). Numpy only.

Like other spans they are drawn by key and placed without randomness (trainer/spans.py). Legend: n documents.
"""

import numpy as np
from numpy.typing import NDArray

from trainer.spans import I64, Draws, SpanConfig, Spans, pick, scale

DISTANT = "distant spans"
"""The purpose of their draws."""


def place_distant(config: SpanConfig, draws: Draws, num_tokens: I64, longest: I64) -> tuple[Spans, NDArray[np.bool_]]:
    """An anchor and a positive of each document with `max_tokens` tokens or more between them.

    Lengths follow the laws of all anchors and positives. What the two and the distance leave of the document is spread
    by chance before, between and behind them, and chance decides which comes first. Where a document is too short for
    the distance, one span begins it and the other ends it.

    Args:
        config: geometry; of its anchors and positives the first are placed.
        draws: the random numbers.
        num_tokens: `(n,)` lengths of the documents, at least twice `longest`.
        longest: `(n,)` longest span of each document.

    Returns:
        The spans, with one anchor and one positive, and `(n,)` whether they are `max_tokens` apart.
    """
    anchor = scale(draws.anchor_lengths[:, 0], config.min_tokens, longest)
    positive = scale(draws.positive_lengths[:, 0, 0], config.min_tokens, longest)
    room = num_tokens - anchor - positive
    distance = np.minimum(config.max_tokens, room)
    anchor_draw, positive_draw = draws.anchor_starts[:, 0], draws.positive_starts[:, 0, 0]
    anchor_start, positive_start = (pick(drawn, room - distance + 1) for drawn in (anchor_draw, positive_draw))
    first = anchor_draw < positive_draw  # then its start, drawn from as many places, is not behind the other's
    anchor_start = anchor_start + np.where(first, 0, positive + distance)
    positive_start = positive_start + np.where(first, anchor + distance, 0)
    spans = Spans(
        anchors=np.stack([anchor_start, anchor_start + anchor], axis=-1)[:, None],
        positives=np.stack([positive_start, positive_start + positive], axis=-1)[:, None, None],
        present=np.ones((len(num_tokens), 1), np.bool_),
    )
    return spans, room >= config.max_tokens
