import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.filters import drop_reason
from pipeline.windows import Geometry, window_starts


@given(st.integers(0, 100_000), st.integers(1, 2_000))
def test_windows_tile_the_document_and_leave_less_than_one(num_tokens, max_tokens):
    starts = window_starts(num_tokens, max_tokens)
    assert starts.dtype == np.int32
    assert list(starts) == [k * max_tokens for k in range(num_tokens // max_tokens)]
    assert all(starts + max_tokens <= num_tokens)
    assert num_tokens - len(starts) * max_tokens < max_tokens


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(-1, 4), (4, 0)])
def test_impossible_lengths_are_refused(num_tokens, max_tokens):
    with pytest.raises(ValueError, match="num_tokens"):
        window_starts(num_tokens, max_tokens)


@given(st.integers(1, 5), st.integers(2, 600), st.integers(1, 10_000))
def test_a_kept_document_has_room_for_its_anchors(num_anchors, max_tokens, num_tokens):
    kept = drop_reason(num_tokens, Geometry(num_anchors=num_anchors, max_tokens=max_tokens)) is None
    assert kept == (len(window_starts(num_tokens, max_tokens)) >= 2 * num_anchors)


def test_the_limit_itself_is_long_enough():
    geometry = Geometry()
    assert geometry.min_document_tokens == 2048
    assert drop_reason(2048, geometry) is None
    assert drop_reason(2047, geometry) == "too_short"
    assert drop_reason(0, geometry) == "empty"
