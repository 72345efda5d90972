import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import says

from declutr.pipeline.shards.schema import geometry_of, shard_schema
from declutr.pipeline.shards.windows import (
    Geometry,
    document_windows,
    drop_reason,
    limit_in_words,
    shortest_document,
    window_starts,
    window_tokens,
)


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


MODES = ["drop", "fewer_anchors", "shrink_spans"]
geometries = st.builds(
    lambda num_anchors, max_tokens, less: Geometry(
        num_anchors=num_anchors, max_tokens=max_tokens, min_tokens=max(1, max_tokens - less)
    ),
    st.integers(1, 5),
    st.integers(2, 600),
    st.integers(0, 600),
)


@given(st.sampled_from(MODES), geometries, st.integers(1, 7_000))
def test_every_mode_keeps_what_has_room(mode, geometry, num_tokens):
    """fewer_anchors: for one anchor. shrink_spans: for all of them, in windows of at least min_tokens."""
    longest = window_tokens(num_tokens, geometry, mode)
    room = num_tokens // (2 * longest) if longest else 0
    enough = room >= (1 if mode == "fewer_anchors" else geometry.num_anchors)
    if mode == "shrink_spans":
        enough = enough and longest >= geometry.min_tokens
    assert (drop_reason(num_tokens, geometry, mode) is None) == enough
    assert drop_reason(num_tokens, geometry, mode) in (None, "too_short")
    if enough:
        windows = document_windows(num_tokens, geometry, mode)
        assert windows.tolist() == window_starts(num_tokens, longest).tolist()
        assert len(windows) // 2 >= room


@given(geometries, st.integers(0, 7_000))
def test_a_document_that_is_kept_in_every_mode_has_the_same_windows(geometry, extra):
    num_tokens = geometry.min_document_tokens + extra
    for mode in MODES:
        assert drop_reason(num_tokens, geometry, mode) is None
        assert (
            document_windows(num_tokens, geometry, mode).tolist()
            == window_starts(num_tokens, geometry.max_tokens).tolist()
        )


@pytest.mark.parametrize(
    ("mode", "least", "words"),
    [
        ("drop", 2048, ("geometry.num_anchors (2)", "geometry.max_tokens (512)", "= 2048")),
        ("fewer_anchors", 1024, ("geometry.max_tokens (512)", "= 1024")),
        ("shrink_spans", 128, ("geometry.num_anchors (2)", "geometry.min_tokens (32)", "= 128")),
    ],
)
def test_shortest_document_of_the_papers_geometry_follows_from_the_mode(mode, least, words):
    geometry = Geometry()
    assert shortest_document(geometry, mode) == least
    says(limit_in_words(geometry, mode), words)
    assert drop_reason(least, geometry, mode) is None
    assert drop_reason(least - 1, geometry, mode) == "too_short"
    assert drop_reason(0, geometry, mode) == "empty"


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_says_how_short_documents_were_treated(mode):
    geometry = Geometry(num_anchors=3, max_tokens=64, min_tokens=32)
    assert geometry_of(shard_schema(10, geometry, "f", mode)) == (geometry, mode)
