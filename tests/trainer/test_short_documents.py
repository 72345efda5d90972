"""Documents with room for fewer anchors, or for shorter spans only: their spans, their batches, and the exact loss."""

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from measures import deviation
from messages import all_of
from spanbounds import check_document, span_configs
from tiny import (
    SHORT_LENGTHS,
    contrastive,
    documents,
    rank_batch,
    rows_of,
    tiny_collator,
    tiny_encoder,
    tiny_train_step,
)

from declutr.pipeline.shards.windows import Geometry, document_windows, shortest_document, window_starts, window_tokens
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.spans import draw, place

MODES = ("fewer_anchors", "shrink_spans")
FIRST_EPOCH = np.zeros(1, np.int64)


@st.composite
def settings(draw_):
    spans = draw_(span_configs(("all", "adjacent", "subsuming"), least=2))
    more = draw_(st.integers(0, 2))  # the shards may have room for more anchors than are trained on
    least = draw_(st.integers(spans.min_tokens, spans.max_tokens))
    return spans, Geometry(num_anchors=spans.num_anchors + more, max_tokens=spans.max_tokens, min_tokens=least)


def windows_of(lengths, geometry, mode):
    starts = [document_windows(length, geometry, mode).astype(np.int64) for length in lengths.tolist()]
    return np.concatenate(starts), np.cumsum([0, *map(len, starts)])


def sampled(spans, geometry, mode, lengths, seed, keys=None):
    keys = np.arange(len(lengths), dtype=np.uint64) if keys is None else keys
    draws = draw(spans, seed, np.zeros(len(lengths), np.int64), keys)
    return place(spans, draws, lengths, *windows_of(lengths, geometry, mode), mode)


@pytest.mark.parametrize("mode", MODES)
@given(setting=settings(), extra=st.lists(st.integers(0, 300), max_size=6), seed=st.integers(0, 2**32))
def test_spans_of_short_documents_keep_every_bound(mode, setting, extra, seed):
    spans, geometry = setting
    lengths = shortest_document(geometry, mode) + np.array([0, 1, *extra])
    found = sampled(spans, geometry, mode, lengths, seed)
    counts = found.present.sum(axis=1)
    room = lengths // (2 * spans.max_tokens)
    wanted = spans.num_anchors
    assert counts.tolist() == [min(wanted, fit) if mode == "fewer_anchors" else wanted for fit in room]
    for row, (count, length) in enumerate(zip(counts, lengths.tolist(), strict=True)):
        assert found.present[row].tolist() == [True] * count + [False] * (wanted - count)
        assert (found.anchors[row, count:] == 0).all()
        assert (found.positives[row, count:] == 0).all()
        longest = spans.max_tokens
        if mode == "shrink_spans":
            longest = min(longest, length // (2 * geometry.num_anchors))
            assert longest >= geometry.min_tokens
        assert longest == window_tokens(length, geometry, mode)
        check_document(spans, length, longest, found.anchors[row, :count], found.positives[row, :count])


@pytest.mark.parametrize("mode", MODES)
@given(setting=settings(), extra=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_a_short_document_has_the_spans_that_its_own_geometry_gives(mode, setting, extra, seed):
    """Fewer anchors: as if that many were asked for. Shorter spans: as if they were the longest asked for."""
    spans, geometry = setting
    lengths = np.array([shortest_document(geometry, mode) + extra])
    found = sampled(spans, geometry, mode, lengths, seed)
    count, longest = int(found.present.sum()), window_tokens(int(lengths[0]), geometry, mode)
    own = spans.model_copy(update={"num_anchors": count, "max_tokens": longest})
    draws = draw(own, seed, FIRST_EPOCH, np.zeros(1, np.uint64))
    starts = window_starts(int(lengths[0]), longest).astype(np.int64)
    expected = place(own, draws, lengths, starts, np.array([0, len(starts)]))
    assert np.array_equal(found.anchors[:, :count], expected.anchors)
    assert np.array_equal(found.positives[:, :count], expected.positives)


@given(settings(), st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(0, 2**32))
def test_long_documents_have_the_same_spans_in_every_mode_and_any_batch(setting, extra, seed):
    spans, geometry = setting
    long = geometry.min_document_tokens + np.array(extra)
    keys = np.arange(len(long), dtype=np.uint64)
    expected = sampled(spans, geometry, "drop", long, seed, keys)
    assert expected.present.all()
    for mode in MODES:
        short = np.array([shortest_document(geometry, mode)])  # ahead of the others
        among = sampled(spans, geometry, mode, np.append(short, long), seed, np.append(np.uint64(99), keys))
        assert np.array_equal(among.anchors[1:], expected.anchors)
        assert np.array_equal(among.positives[1:], expected.positives)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "geometry", "message"),
    [
        ("drop", 47, Geometry(num_anchors=2, max_tokens=12), ("47 tokens", "too short", "48")),
        ("fewer_anchors", 23, Geometry(num_anchors=2, max_tokens=12), ("23 tokens", "1 windows", "0 anchors")),
        ("shrink_spans", 20, Geometry(num_anchors=1, max_tokens=12), ("2 windows", "1 anchors", "2")),
        (
            "shrink_spans",
            15,
            Geometry(num_anchors=2, max_tokens=12),
            ("windows of 3 tokens", "min_tokens = 4", "lower"),
        ),
    ],
)
def test_a_document_that_the_mode_would_not_keep_is_an_error(mode, num_tokens, geometry, message):
    spans = SpanConfig(num_anchors=2, num_positives=1, min_tokens=4, max_tokens=12)
    with pytest.raises(ValueError, match=all_of(message)):
        sampled(spans, geometry, mode, np.array([num_tokens]), 0)


OBJECTIVES = {name: values for name, values in tiny.OBJECTIVES.items() if name != "by name"}


def shard_rows(mode, row=None):
    """Documents as `prepare` leaves them in this mode, or one of them."""
    table = documents(SHORT_LENGTHS[mode], 12, mode=mode)
    return table if row is None else table.slice(row, 1)


def collator_for(mode, objective, num_anchors=2):
    spans = SpanConfig(num_anchors=num_anchors, num_positives=2, min_tokens=3, max_tokens=12)
    return tiny_collator(DeclutrConfig(**objective), spans, mode=mode)


def same(found, expected):
    fields = ("input_ids", "lengths", "selected", "labels", "keys")
    return all(torch.equal(getattr(found, name), getattr(expected, name)) for name in fields)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_a_document_with_room_for_one_anchor_gives_the_batch_of_one_anchor(objective):
    """Tokens, masks and dropout: whatever is not there takes nothing from what is."""
    one, two = (collator_for("fewer_anchors", objective, number) for number in (1, 2))
    for row, count in enumerate([1, 2, 1, 2, 1]):
        table = shard_rows("fewer_anchors", row)
        expected = one.batch(table, FIRST_EPOCH)
        assert same(two.batch(table, FIRST_EPOCH), expected) == (count == 1)
    everything = two.batch(shard_rows("fewer_anchors"), np.zeros(5, np.int64))
    kinds = [7] + [7] * two.config.unmasked_anchors + [14] * two.config.embeds
    assert everything.num_spans == sum(kinds)


def setup(mode, objective):
    encoder = tiny_encoder(dropout=0.2, projection={"kind": "mlp", "size": 6})
    batch = rank_batch(collator_for(mode, objective), shard_rows(mode))
    return tiny_train_step(encoder, DeclutrConfig(**objective)), batch


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_all_documents_views(mode):
    """Each document's views, made alone, one after the other: the order and number of pairs in the global loss."""
    train_step, batch = setup(mode, OBJECTIVES["unmasked anchors"])
    [found] = train_step.gradients({"": batch}, 1)
    collator, objective = collator_for(mode, OBJECTIVES["unmasked anchors"]), train_step.tasks[0].objective
    batches = [collator.collate(shard_rows(mode, row), FIRST_EPOCH) for row in range(5)]
    views = [objective.views(train_step.encoder(alone.spans)[0], alone) for alone in batches]
    assert [len(view) for view in views] == ([1, 2, 1, 2, 1] if mode == "fewer_anchors" else [2] * 5)
    expected = contrastive(objective, torch.cat(views))
    assert deviation([found.terms["contrastive"]], [expected]) < 1e-10


def test_spans_of_other_documents_are_refused():
    train_step, batch = setup("fewer_anchors", OBJECTIVES["both"])
    spans = train_step.encoder(batch.spans)[0]
    assert len(train_step.tasks[0].objective.views(spans, batch)) == batch.num_rows == 7
    for rows in (6, 8):
        with pytest.raises(ValueError, match=all_of("21 spans", f"{rows} anchors", "3 spans")):
            train_step.tasks[0].objective.views(spans, rows_of(spans, rows))
