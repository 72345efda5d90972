"""Spans: bounds for any geometry and every treatment of short documents, their laws, distant spans of a validation."""

import random

import numpy as np
import pytest
import tinyruns as runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of
from prepared import Row, write_prepared
from scipy import stats
from tinyruns import span_validator

from declutr.pipeline.shards.windows import Geometry, document_windows, shortest_document, window_tokens
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.spans import Draws, draw, pair_lengths, place
from declutr.trainer.objectives.declutr.validator import DISTANT, place_distant

STRATEGIES = ("all", "adjacent", "subsuming", "distant")
MODES = ("fewer_anchors", "shrink_spans")
GEOMETRY = Geometry(num_anchors=2, max_tokens=12)


@st.composite
def span_configs(draw_, strategies=STRATEGIES, least=1):
    longest, strategy = draw_(st.integers(least, 40)), draw_(st.sampled_from(strategies))
    shortest = draw_(st.integers(1, longest))
    queries = {"query_share": draw_(st.sampled_from([0.3, 1.0]))} if draw_(st.booleans()) else {}
    if queries:
        queries["query_tokens"] = sorted(draw_(st.lists(st.integers(1, shortest), min_size=2, max_size=2)))
    return SpanConfig(
        num_anchors=draw_(st.integers(1, 5)),
        num_positives=draw_(st.integers(1, 4)),
        min_tokens=shortest,
        max_tokens=longest,
        strategy=strategy,
        min_distance_tokens=draw_(st.integers(0, 100)) if strategy == "distant" else 0,
        **queries,
    )


def check_queries(spans, num_tokens, longest, anchors, positives):
    """Checks the anchors of a document that are as short as a query, and the spans next to them."""
    (start, end), (first, last) = anchors.T, positives.transpose(2, 0, 1)
    assert ((end - start >= spans.query_tokens[0]) & (end - start <= spans.query_tokens[1])).all()
    assert (start // longest == (end - 1) // longest).all()  # inside one window
    room = np.minimum(longest, np.maximum(start, num_tokens - end))[:, None]
    assert ((last - first >= np.minimum(spans.min_tokens, room)) & (last - first <= room)).all()
    behind = end[:, None] + (last - first) <= num_tokens
    assert np.where(behind, first == end[:, None], last == start[:, None]).all()
    assert ((first >= 0) & (last <= num_tokens)).all()


def check_document(spans, num_tokens, longest, anchors, positives):
    """Every bound of one document's spans, `(a, 2)` and `(a, P, 2)`, for spans of at most `longest` tokens."""
    top = max(spans.min_tokens, longest - 1)  # the longest itself has probability 0, unless it is the shortest
    (start, end), (first, last) = anchors.T[..., None], positives.transpose(2, 0, 1)
    assert ((end - start >= spans.min_tokens) & (end - start <= top)).all()
    assert (end <= (start // longest + 1) * longest).all()  # inside one window
    assert (end <= num_tokens // longest * longest).all()  # never in the tail
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


def windows_of(lengths, geometry, mode="drop"):
    """Windows of documents; in the mode `drop` a config of spans is a geometry too."""
    starts = [document_windows(length, geometry, mode).astype(np.int64) for length in lengths]
    return np.concatenate(starts), np.cumsum([0, *map(len, starts)])


def sampled(spans, geometry, mode, lengths, seed, keys=None):
    keys = np.arange(len(lengths), dtype=np.uint64) if keys is None else keys
    draws = draw(spans, seed, np.zeros(len(lengths), np.int64), keys)
    return place(spans, draws, lengths, *windows_of(lengths, geometry, mode), mode)


def check_row(config, length, longest, spans, row):
    present, queries = spans.present[row], spans.queries[row]
    for checker, rows in (check_document, present & ~queries), (check_queries, queries):
        checker(config, length, longest, spans.anchors[row][rows], spans.positives[row][rows])
    assert (np.diff(np.sort(spans.anchors[row, present, 0] // longest)) >= 2).all()
    assert not (queries & ~present).any()


@given(span_configs(), st.integers(0, 200), st.data())
def test_spans_at_the_extremes_keep_every_bound(config, extra, data):
    """Draws at both ends of [0, 1), in any mixture: what random draws hardly ever give."""
    extreme = st.sampled_from([0.0, 2.0**-32, 0.5 - 2.0**-32, 0.5, 1 - 2.0**-32])
    anchors = (1, config.num_anchors)
    positives = (*anchors, config.num_positives)
    drawn = [
        np.array(data.draw(st.lists(extreme, min_size=size, max_size=size))).reshape(shape)
        for shape in (anchors, anchors, anchors, positives, positives, *[anchors] * bool(config.query_share))
        for size in [int(np.prod(shape))]
    ]
    lengths = np.array([config.min_document_tokens + extra])
    spans = place(config, Draws(*drawn), lengths, *windows_of(lengths, config))
    check_row(config, lengths[0], config.max_tokens, spans, 0)


def test_draws_change_with_each_of_seed_epoch_document():
    config = SpanConfig(num_anchors=1, num_positives=1)
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**40)]
    draws = [draw(config, seed, np.array([epoch]), np.array([key], np.uint64)) for seed, epoch, key in places]
    assert len({drawn.anchor_lengths.item() for drawn in draws}) == 5


def test_place_distant_strategy_equals_a_plain_writing():
    """Every allowed place of a positive is listed, and the draw picks one of the list."""
    values = {"min_tokens": 2, "max_tokens": 9, "strategy": "distant", "min_distance_tokens": 30}
    config = SpanConfig(num_anchors=2, num_positives=2, **values)
    lengths, keys = np.arange(36, 96), np.arange(60, dtype=np.uint64)
    draws = draw(config, 3, np.zeros(60, np.int64), keys)
    spans = place(config, draws, lengths, *windows_of(lengths, config))
    short = 0
    for index in np.ndindex(60, 2, 2):
        start, end = spans.anchors[index[:2]]
        size = int(draws.positive_lengths[index] * (9 - 2) + 2)
        distances = {at: max(start - at - size, at - end) for at in range(lengths[index[0]] - size + 1)}
        apart = min(30, max(distances.values()))
        short += apart < 30
        allowed = [at for at, distance in distances.items() if distance >= apart]
        first = allowed[int(draws.positive_starts[index] * len(allowed))]
        assert spans.positives[index].tolist() == [first, first + size]
    assert 0 < short < 240


@given(span_configs(), st.integers(1, 40), st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(0, 2**32))
def test_windows_may_be_longer_than_spans(config, longer, extra, seed):
    """Shards that were prepared for longer spans: anchors lie anywhere in their windows, and apart."""
    window = config.max_tokens + longer
    lengths = 2 * config.num_anchors * window + np.array(extra)
    spans = sampled(config, config.model_copy(update={"max_tokens": window}), "drop", lengths, seed)
    for row, length in enumerate(lengths.tolist()):
        check_row(config, length, window, spans, row)
    assert max(np.diff(spans.anchors).max(), np.diff(spans.positives).max()) <= config.max_tokens


def test_queries_have_their_share_and_leave_the_other_spans_as_they_are():
    keys, lengths = np.arange(3000, dtype=np.uint64), np.full(3000, 300)
    config = SpanConfig(num_anchors=1, num_positives=1, max_tokens=64, strategy="distant", min_distance_tokens=96)
    asking = config.model_copy(update={"query_share": 0.3})
    plain, mixed = (sampled(spans, spans, "drop", lengths, 5, keys) for spans in (config, asking))
    assert mixed.queries.mean() == pytest.approx(0.3, abs=0.03)
    assert (plain.anchors == mixed.anchors)[~mixed.queries].all()
    assert (plain.positives == mixed.positives)[~mixed.queries].all()
    sizes = np.diff(mixed.anchors[mixed.queries], axis=-1)
    assert (sizes.min(), sizes.max()) == (4, 16)


def test_short_spans_come_from_the_whole_window():
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=16)
    spans = sampled(config, config.model_copy(update={"max_tokens": 64}), "drop", np.full(2000, 128), 0)
    first = spans.anchors[:, 0, 0] % 64
    assert (np.histogram(first, bins=[0, 16, 32, 48])[0] > 400).all()  # a quarter each, but for the window's end


def test_an_adjacent_positive_may_touch_either_end_of_the_document():
    """The anchor is 4 to 8 of 12 tokens, and both neighbours of 4 tokens just fit."""
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=4, max_tokens=4, strategy="adjacent")
    half = np.full((1, 1), 0.5)
    for side, first in ((0.2, 0), (0.7, 8)):
        draws = Draws(half, half, half, half[..., None], np.full((1, 1, 1), side))
        spans = place(config, draws, np.array([12]), *windows_of([12], config))
        assert (spans.anchors.tolist(), spans.positives.tolist()) == ([[[4, 8]]], [[[[first, first + 4]]]])


@pytest.mark.parametrize(("anchor", "positive"), [((4, 2), (2, 4)), ((1, 1), (1, 1)), ((2, 5), (8, 2))])
def test_lengths_have_the_beta_law_of_the_settings(anchor, positive):
    keys = np.arange(4000, dtype=np.uint64)
    config = SpanConfig(num_anchors=2, num_positives=2, anchor_beta=anchor, positive_beta=positive)
    drawn = draw(config, 3, np.zeros(4000, np.int64), keys)
    for lengths, (a, b) in ((drawn.anchor_lengths, anchor), (drawn.positive_lengths, positive)):
        assert stats.kstest(lengths.reshape(-1)[:4000], stats.beta(a, b).cdf).pvalue > 1e-3
        assert np.corrcoef(lengths.reshape(4000, -1).T)[0, 1] == pytest.approx(0, abs=0.06)
    assert stats.kstest(drawn.anchor_starts.reshape(-1), stats.uniform.cdf).pvalue > 1e-3


@st.composite
def settings(draw_, mode=None):
    spans = draw_(span_configs(STRATEGIES if mode == "drop" else STRATEGIES[:3], least=2))
    more = draw_(st.integers(0, 2))  # the shards may have room for more anchors than are trained on
    least = draw_(st.integers(spans.min_tokens, spans.max_tokens))
    return spans, Geometry(num_anchors=spans.num_anchors + more, max_tokens=spans.max_tokens, min_tokens=least)


@pytest.mark.parametrize("mode", ["drop", *MODES])
@given(data=st.data(), extra=st.lists(st.integers(0, 300), max_size=6), seed=st.integers(0, 2**32))
def test_spans_keep_every_bound(mode, data, extra, seed):
    spans, geometry = data.draw(settings(mode))
    lengths = shortest_document(geometry, mode) + np.array([0, 1, *extra])
    found = sampled(spans, geometry, mode, lengths, seed)
    counts = found.present.sum(axis=1)
    number, room = spans.num_anchors, lengths // (2 * spans.max_tokens)
    assert counts.tolist() == [min(number, fit) if mode == "fewer_anchors" else number for fit in room]
    for row, (count, length) in enumerate(zip(counts, lengths.tolist(), strict=True)):
        assert found.present[row].tolist() == [True] * count + [False] * (number - count)
        assert not found.anchors[row, count:].any()
        assert not found.positives[row, count:].any()
        longest = spans.max_tokens
        if mode == "shrink_spans":
            longest = min(longest, length // (2 * geometry.num_anchors))
            assert longest >= geometry.min_tokens
        assert longest == window_tokens(length, geometry, mode)
        check_row(spans, length, longest, found, row)


@pytest.mark.parametrize("mode", MODES)
@given(setting=settings(), extra=st.lists(st.integers(0, 600), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_each_document_has_the_spans_that_its_own_geometry_gives_in_any_batch(mode, setting, extra, seed):
    """Fewer anchors: as if that many were asked for. Shorter spans: as if they were the longest asked for."""
    spans, geometry = setting
    lengths, keys = (
        shortest_document(geometry, mode) + np.array([0, *extra]),
        np.arange(1 + len(extra), dtype=np.uint64),
    )
    found = sampled(spans, geometry, mode, lengths, seed)
    for row in (slice(number, number + 1) for number in range(len(lengths))):
        count, longest = int(found.present[row].sum()), window_tokens(int(lengths[row][0]), geometry, mode)
        assert lengths[row] < shortest_document(geometry) or (count, longest) == (spans.num_anchors, spans.max_tokens)
        own = spans.model_copy(update={"num_anchors": count, "max_tokens": longest})
        expected = sampled(own, own, "drop", lengths[row], seed, keys[row])
        assert np.array_equal(found.anchors[row, :count], expected.anchors)
        assert np.array_equal(found.positives[row, :count], expected.positives)


@pytest.mark.parametrize(
    ("mode", "num_tokens", "geometry", "message"),
    [
        ("drop", 47, GEOMETRY, ("47 tokens", "too short", "48")),
        ("fewer_anchors", 23, GEOMETRY, ("23 tokens", "1 windows", "0 anchors")),
        ("shrink_spans", 20, Geometry(num_anchors=1, max_tokens=12), ("2 windows", "1 anchors", "2")),
        ("shrink_spans", 15, GEOMETRY, ("windows of 3 tokens", "min_tokens = 4", "lower")),
        ("drop", 60, Geometry(num_anchors=2, max_tokens=6), ("windows of 6 tokens", "too short", "max_tokens = 12")),
    ],
)
def test_a_document_that_the_mode_would_not_keep_is_an_error(mode, num_tokens, geometry, message):
    spans = SpanConfig(num_anchors=2, num_positives=1, min_tokens=4, max_tokens=12)
    with pytest.raises(ValueError, match=all_of(message)):
        sampled(spans, geometry, mode, np.array([num_tokens]), 0)


def pairs(config, lengths, longest, seed=0, keys=None):
    """Starts and ends of anchors and of positives, `(n, 2)` each, and which are as far apart as they should be."""
    keys = np.arange(len(lengths), dtype=np.uint64) if keys is None else keys
    draws = draw(config, seed, np.zeros(len(lengths), np.int64), keys, DISTANT)
    windows = np.stack([np.zeros_like(longest), longest], axis=1).reshape(-1)  # as documents with short spans have them
    sizes = pair_lengths(config, draws, windows, 2 * np.arange(len(longest) + 1), "shrink_spans")
    spans, reached = place_distant(draws, lengths, sizes, config.max_tokens)
    assert spans.present.all()
    return spans.anchors[:, 0], spans.positives[:, 0, 0], reached


ADJACENT = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=64, strategy="adjacent")


@st.composite
def corpora(draw_):
    """A geometry and documents: short ones, whose longest span is shorter, among long ones."""
    top = draw_(st.integers(1, 40))
    bottom = draw_(st.integers(1, top))
    longest = np.array(draw_(st.lists(st.integers(bottom, top), min_size=1, max_size=6)))
    lengths = 2 * longest + np.array([draw_(st.integers(0, 200)) for _ in longest])
    return ADJACENT.model_copy(update={"min_tokens": bottom, "max_tokens": top}), lengths, longest


@given(corpora(), st.integers(0, 2**32))
def test_distant_spans_keep_every_bound(corpus, seed):
    config, lengths, longest = corpus
    anchors, positives, reached = pairs(config, lengths, longest, seed)
    for start, end in (anchors.T, positives.T):
        assert ((end - start >= config.min_tokens) & (end - start <= np.maximum(config.min_tokens, longest - 1))).all()
        assert ((start >= 0) & (end <= lengths)).all()
    between = np.maximum(anchors[:, 0], positives[:, 0]) - np.minimum(anchors[:, 1], positives[:, 1])
    assert (between >= 0).all()
    assert (reached == (between >= config.max_tokens)).all()
    assert reached[lengths >= 2 * longest + config.max_tokens].all()
    for short in np.flatnonzero(~reached):  # as far apart as the document allows: at its two ends
        ends = np.concatenate([anchors[short], positives[short]])
        assert (ends.min(), ends.max()) == (0, lengths[short])


def test_lengths_follow_the_laws_of_all_spans_and_places_are_spread():
    anchors, positives, reached = pairs(ADJACENT, np.full(4000, 1000), np.full(4000, 64))
    assert reached.all()
    sizes = np.diff(anchors)[:, 0], np.diff(positives)[:, 0]
    assert [size.mean() for size in sizes] == pytest.approx([8 + 56 * 4 / 6, 8 + 56 * 2 / 6], abs=1)
    assert (anchors[:, 0] < positives[:, 0]).mean() == pytest.approx(0.5, abs=0.03)
    first, last = np.minimum(anchors, positives)[:, 0], np.maximum(anchors, positives)[:, 1]
    left = 1000 - 64 - sum(sizes)
    assert (first / left).mean() == pytest.approx(1 / 3, abs=0.02)  # what is left: a third before, between, behind
    assert ((1000 - last) / left).mean() == pytest.approx(1 / 3, abs=0.02)


def test_a_documents_spans_are_its_own_and_the_seeds():
    lengths, longest, keys = np.array([300, 900, 5000]), np.full(3, 64), np.array([5, 6, 7], np.uint64)
    together = pairs(ADJACENT, lengths, longest, 3, keys)
    for own in (slice(number, number + 1) for number in range(3)):
        alone = pairs(ADJACENT, lengths[own], longest[own], 3, keys[own])
        assert all(np.array_equal(part, every[own]) for part, every in zip(alone, together, strict=True))
    assert not np.array_equal(pairs(ADJACENT, lengths, longest, 4, keys)[0], together[0])


def test_a_score_is_not_fooled_by_what_only_touching_spans_share(tmp_path):
    """Random weights tell little more than which tokens two spans share."""
    rng = random.Random(0)
    words, scores = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(400)], {}
    for name, passages in (("one topic each", 1), ("a topic a passage", 8)):
        topics = [[rng.sample(words, 3) for _ in range(passages)] for _ in range(40)]
        documents = [" ".join(" ".join(rng.choices(topic, k=120 // passages)) for topic in part) for part in topics]
        write_prepared(tmp_path / name, [[Row("train " * 60), *(Row(text, "held-out") for text in documents)]])
        config = runs.train_config(tmp_path / name, "-", spans={"num_anchors": 1}, validation={"every_steps": 1})
        tokenizer, vocabulary = load_tokenizer(tmp_path / name)
        encoder = build_encoder(config, tokenizer)
        validator = span_validator(config, encoder, vocabulary)
        held_out = validator.embed(encoder)
        table = validator.held_out.shards.take(validator.rows)
        touching = encoder.eval().embed(validator.collator.collate(table, np.full(len(table), 2**32 - 1)).spans)
        assert torch.equal(torch.cat(held_out[:2]), touching.double()), "the touching spans are those of the collator"
        scores[name] = validator.scores(encoder)
        assert held_out[-1].all()
    single, many = scores.values()
    assert min(single["recall_at_1"], single["distant_recall_at_1"], many["recall_at_1"]) > 0.3
    assert many["distant_recall_at_1"] < 0.1
    assert many["distant_mrr"] < many["mrr"] / 2
