"""Settings of spans, and bounds that every span of a document keeps."""

import numpy as np
from hypothesis import strategies as st

from declutr.trainer.objectives.config import SpanConfig


@st.composite
def span_configs(draw, strategies=("all", "adjacent", "subsuming", "distant"), least=1):
    longest, strategy = draw(st.integers(least, 40)), draw(st.sampled_from(strategies))
    return SpanConfig(
        num_anchors=draw(st.integers(1, 5)),
        num_positives=draw(st.integers(1, 4)),
        min_tokens=draw(st.integers(1, longest)),
        max_tokens=longest,
        strategy=strategy,
        min_distance_tokens=draw(st.integers(0, 100)) if strategy == "distant" else 0,
    )


def check_document(spans, num_tokens, longest, anchors, positives):
    """Every bound of one document's spans, `(a, 2)` and `(a, P, 2)`, for spans of at most `longest` tokens."""
    top = max(spans.min_tokens, longest - 1)  # the longest itself has probability 0, unless it is the shortest
    start, end = anchors.T
    assert ((end - start >= spans.min_tokens) & (end - start <= top)).all()
    window = start // longest
    assert (end <= (window + 1) * longest).all()  # inside one window
    assert (end <= num_tokens // longest * longest).all()  # never in the tail
    assert (np.diff(np.sort(window)) >= 2).all()
    first, last = positives[..., 0], positives[..., 1]
    start, end = start[:, None], end[:, None]
    assert ((first >= 0) & (last <= num_tokens)).all()
    size, most = last - first, np.maximum(spans.min_tokens, end - start - 1) if spans.strategy == "subsuming" else top
    assert ((size >= spans.min_tokens) & (size <= most)).all()
    if spans.strategy == "subsuming":
        assert ((first >= start) & (last <= end)).all()
    elif spans.strategy == "adjacent":
        assert ((last == start) | (first == end)).all()
    elif spans.strategy == "distant":
        distance, room = np.maximum(start - last, first - end), np.maximum(start, num_tokens - end) - size
        assert ((distance >= np.minimum(spans.min_distance_tokens, room)) & (room >= 0)).all()
    else:
        assert ((first <= end) & (last >= start)).all()  # overlaps or touches
