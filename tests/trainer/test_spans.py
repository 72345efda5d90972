"""Bounds of sampled spans, for any geometry; that they belong to the document; distant spans of a validation."""

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
from spanbounds import check_document, span_configs
from tinyruns import span_validator

from declutr.pipeline.shards.windows import window_starts
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.spans import Draws, draw, pair_lengths, place
from declutr.trainer.objectives.declutr.validator import DISTANT, place_distant


def windows_of(lengths, config):
    starts = [window_starts(length, config.max_tokens).astype(np.int64) for length in lengths]
    return np.concatenate(starts), np.cumsum([0, *map(len, starts)])


def check(config, lengths, spans):
    for row, length in enumerate(lengths.tolist()):
        check_document(config, length, config.max_tokens, spans.anchors[row], spans.positives[row])


@given(span_configs(), st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(0, 2**32))
def test_spans_keep_every_bound(config, extra, seed):
    lengths = config.min_document_tokens + np.array(extra)
    keys = np.arange(len(lengths), dtype=np.uint64)
    draws = draw(config, seed, np.zeros(len(lengths), np.int64), keys)
    check(config, lengths, place(config, draws, lengths, *windows_of(lengths, config)))


@given(span_configs(), st.integers(0, 200), st.data())
def test_spans_at_the_extremes_keep_every_bound(config, extra, data):
    """Draws at both ends of [0, 1), in any mixture: what random draws hardly ever give."""
    extreme = st.sampled_from([0.0, 2.0**-32, 0.5 - 2.0**-32, 0.5, 1 - 2.0**-32])
    anchors = (1, config.num_anchors)
    positives = (*anchors, config.num_positives)
    drawn = [
        np.array(data.draw(st.lists(extreme, min_size=size, max_size=size))).reshape(shape)
        for shape in (anchors, anchors, anchors, positives, positives)
        for size in [int(np.prod(shape))]
    ]
    lengths = np.array([config.min_document_tokens + extra])
    check(config, lengths, place(config, Draws(*drawn), lengths, *windows_of(lengths, config)))


@given(span_configs(), st.lists(st.integers(0, 100), min_size=2, max_size=6), st.integers(0, 2**32))
def test_a_document_has_its_spans_in_any_batch(config, extra, seed):
    lengths = config.min_document_tokens + np.array(extra)
    keys = np.arange(10, 10 + len(lengths), dtype=np.uint64)
    epochs = np.arange(len(lengths))
    together = place(config, draw(config, seed, epochs, keys), lengths, *windows_of(lengths, config))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        draws = draw(config, seed, epochs[one], keys[one])
        alone = place(config, draws, lengths[one], *windows_of(lengths[one], config))
        assert (alone.anchors[0] == together.anchors[row]).all()
        assert (alone.positives[0] == together.positives[row]).all()


def test_draws_change_with_each_of_seed_epoch_document():
    config = SpanConfig(num_anchors=1, num_positives=1)
    rows = [
        draw(config, seed, np.array([epoch]), np.array([key], np.uint64)).anchor_lengths.item()
        for seed, epoch, key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**40)]
    ]
    assert len(set(rows)) == len(rows)


def test_an_anchors_draws_do_not_depend_on_how_many_follow():
    few, many = (
        draw(SpanConfig(num_anchors=n, num_positives=2), 0, np.zeros(3, np.int64), np.arange(3, dtype=np.uint64))
        for n in (1, 3)
    )
    assert (few.windows[:, 0] == many.windows[:, 0]).all()
    assert (few.positive_lengths[:, 0] == many.positive_lengths[:, 0]).all()


def test_the_smallest_document_is_enough_and_one_token_less_is_not():
    config = SpanConfig(num_anchors=3, num_positives=1, min_tokens=1, max_tokens=4)
    draws = draw(config, 0, np.zeros(1, np.int64), np.zeros(1, np.uint64))
    enough, short = np.array([24]), np.array([23])
    check(config, enough, place(config, draws, enough, *windows_of(enough, config)))
    with pytest.raises(ValueError, match=all_of("23 tokens", "too short", "num_anchors = 3", "max_tokens = 4", "24")):
        place(config, draws, short, *windows_of(short, config))


def test_place_distant_strategy_equals_a_plain_writing():
    """Every allowed place of a positive is listed, and the draw picks one of the list."""
    config = SpanConfig(
        num_anchors=2, num_positives=2, min_tokens=2, max_tokens=9, strategy="distant", min_distance_tokens=30
    )
    lengths, keys = np.arange(36, 96), np.arange(60, dtype=np.uint64)
    draws = draw(config, 3, np.zeros(60, np.int64), keys)
    spans = place(config, draws, lengths, *windows_of(lengths, config))
    short = 0
    for document, anchor, number in np.ndindex(60, 2, 2):
        start, end = spans.anchors[document, anchor]
        size = int(draws.positive_lengths[document, anchor, number] * (9 - 2) + 2)
        total = lengths[document]
        distances = {at: max(start - at - size, at - end) for at in range(total - size + 1)}
        wanted = min(30, max(distances.values()))
        short += wanted < 30
        allowed = [at for at, distance in distances.items() if distance >= wanted]
        first = allowed[int(draws.positive_starts[document, anchor, number] * len(allowed))]
        assert spans.positives[document, anchor, number].tolist() == [first, first + size]
    assert 0 < short < 240


@given(span_configs(), st.integers(1, 40), st.lists(st.integers(0, 200), min_size=1, max_size=6), st.integers(0, 2**32))
def test_windows_may_be_longer_than_spans(config, longer, extra, seed):
    """Shards that were prepared for longer spans: anchors lie anywhere in their windows, and apart."""
    window = config.max_tokens + longer
    lengths = 2 * config.num_anchors * window + np.array(extra)
    starts = [window_starts(length, window).astype(np.int64) for length in lengths]
    draws = draw(config, seed, np.zeros(len(lengths), np.int64), np.arange(len(lengths), dtype=np.uint64))
    spans = place(config, draws, lengths, np.concatenate(starts), np.cumsum([0, *map(len, starts)]))
    start, end = spans.anchors[..., 0], spans.anchors[..., 1]
    assert (end - start >= config.min_tokens).all()
    assert (np.maximum(end - start, np.diff(spans.positives, axis=-1)[..., 0].max(-1)) <= config.max_tokens).all()
    assert (end <= (start // window + 1) * window).all()
    chosen = start // window
    apart = np.abs(chosen[:, :, None] - chosen[:, None, :])
    assert (apart[:, ~np.eye(config.num_anchors, dtype=bool)] >= 2).all()
    assert ((spans.positives[..., 0] >= 0) & (spans.positives[..., 1] <= lengths[:, None, None])).all()


def test_short_spans_come_from_the_whole_window():
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=16)
    keys = np.arange(2000, dtype=np.uint64)
    lengths = np.full(2000, 128)
    starts = np.tile(np.array([0, 64]), 2000)
    draws = draw(config, 0, np.zeros(2000, np.int64), keys)
    spans = place(config, draws, lengths, starts, np.arange(2001) * 2)
    first = spans.anchors[:, 0, 0] % 64
    assert (np.histogram(first, bins=[0, 16, 32, 48])[0] > 400).all()  # a quarter each, but for the window's end


def test_spans_longer_than_the_windows_are_refused():
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=32)
    draws = draw(config, 0, np.zeros(1, np.int64), np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match=all_of("16 tokens", "too short", "max_tokens = 32")):
        place(config, draws, np.array([64]), np.arange(4) * 16, np.array([0, 4]))


@pytest.mark.parametrize(("side", "first"), [(0.2, 0), (0.7, 8)])
def test_an_adjacent_positive_may_touch_either_end_of_the_document(side, first):
    """The anchor is 4 to 8 of 12 tokens, and both neighbours of 4 tokens just fit."""
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=4, max_tokens=4, strategy="adjacent")
    half = np.full((1, 1), 0.5)
    draws = Draws(half, half, half, half[..., None], np.full((1, 1, 1), side))
    spans = place(config, draws, np.array([12]), *windows_of([12], config))
    assert spans.anchors.tolist() == [[[4, 8]]]
    assert spans.positives.tolist() == [[[[first, first + 4]]]]


def anchors_of(config, windows):
    """Numbers of anchors of documents with these numbers of windows of 20 tokens."""
    draws = draw(config, 0, np.zeros(len(windows), np.int64), np.arange(len(windows), dtype=np.uint64))
    starts = np.concatenate([20 * np.arange(number) for number in windows])
    offsets = np.cumsum([0, *windows])
    return place(config, draws, 20 * windows, starts, offsets, "fewer_anchors").present.sum(axis=1)


def test_a_short_document_has_an_anchor_for_every_two_windows():
    config = SpanConfig(num_anchors=2, num_positives=1, min_tokens=3, max_tokens=20)
    windows = np.array([2, 3, 4, 5, 9])
    assert anchors_of(config, windows).tolist() == [1, 1, 2, 2, 2]
    with pytest.raises(ValueError, match=all_of("1 windows", "0 anchors")):
        anchors_of(config, np.array([1]))


@pytest.mark.parametrize(("anchor", "positive"), [((4, 2), (2, 4)), ((1, 1), (1, 1)), ((2, 5), (8, 2))])
def test_lengths_have_the_beta_law_of_the_settings(anchor, positive):
    keys = np.arange(4000, dtype=np.uint64)
    config = SpanConfig(num_anchors=2, num_positives=2, anchor_beta=anchor, positive_beta=positive)
    drawn = draw(config, 3, np.zeros(4000, np.int64), keys)
    for lengths, (a, b) in ((drawn.anchor_lengths, anchor), (drawn.positive_lengths, positive)):
        assert stats.kstest(lengths.reshape(-1)[:4000], stats.beta(a, b).cdf).pvalue > 1e-3
        assert np.corrcoef(lengths.reshape(4000, -1).T)[0, 1] == pytest.approx(0, abs=0.06)
    assert stats.kstest(drawn.anchor_starts.reshape(-1), stats.uniform.cdf).pvalue > 1e-3


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
    most = draw_(st.integers(1, 40))
    least = draw_(st.integers(1, most))
    longest = np.array(draw_(st.lists(st.integers(least, most), min_size=1, max_size=6)))
    lengths = 2 * longest + np.array([draw_(st.integers(0, 200)) for _ in longest])
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=least, max_tokens=most, strategy="adjacent")
    return config, lengths, longest


@given(corpora(), st.integers(0, 2**32))
def test_distant_spans_keep_every_bound(corpus, seed):
    config, lengths, longest = corpus
    anchors, positives, reached = pairs(config, lengths, longest, seed)
    for spans in (anchors, positives):
        size = spans[:, 1] - spans[:, 0]
        assert ((size >= config.min_tokens) & (size <= np.maximum(config.min_tokens, longest - 1))).all()
        assert ((spans[:, 0] >= 0) & (spans[:, 1] <= lengths)).all()
    between = np.maximum(anchors[:, 0], positives[:, 0]) - np.minimum(anchors[:, 1], positives[:, 1])
    assert (between >= 0).all()
    assert (reached == (between >= config.max_tokens)).all()
    assert reached[lengths >= 2 * longest + config.max_tokens].all()
    for short in np.flatnonzero(~reached):  # as far apart as the document allows: at its two ends
        ends = np.concatenate([anchors[short], positives[short]])
        assert (ends.min(), ends.max()) == (0, lengths[short])


def test_lengths_follow_the_laws_of_all_spans_and_places_are_spread():
    lengths, longest = np.full(4000, 1000), np.full(4000, 64)
    anchors, positives, reached = pairs(ADJACENT, lengths, longest)
    assert reached.all()
    for spans, mean in ((anchors, 4 / 6), (positives, 2 / 6)):
        assert (spans[:, 1] - spans[:, 0]).mean() == pytest.approx(8 + mean * 56, abs=1)
    assert (anchors[:, 0] < positives[:, 0]).mean() == pytest.approx(0.5, abs=0.03)
    first, last = np.minimum(anchors, positives)[:, 0], np.maximum(anchors, positives)[:, 1]
    left = 1000 - 64 - (anchors[:, 1] - anchors[:, 0]) - (positives[:, 1] - positives[:, 0])
    assert (first / left).mean() == pytest.approx(1 / 3, abs=0.02)  # what is left: a third before, between, behind
    assert ((1000 - last) / left).mean() == pytest.approx(1 / 3, abs=0.02)


def test_a_documents_spans_are_its_own_and_the_seeds():
    lengths, longest, keys = np.array([300, 900, 5000]), np.full(3, 64), np.array([5, 6, 7], np.uint64)
    together = pairs(ADJACENT, lengths, longest, 3, keys)
    for number in range(3):
        own = slice(number, number + 1)
        alone = pairs(ADJACENT, lengths[own], longest[own], 3, keys[own])
        assert all(np.array_equal(one, every[own]) for one, every in zip(alone, together, strict=True))
    assert not np.array_equal(pairs(ADJACENT, lengths, longest, 4, keys)[0], together[0])


def scored(folder, texts):
    """Held-out scores of random weights, which tell little more than which tokens two spans share; and embeddings."""
    write_prepared(folder, [[Row(texts[0]), *(Row(text, "held-out") for text in texts[1:])]])
    config = runs.train_config(folder, "unused", spans={"num_anchors": 1}, validation={"every_steps": 1})
    tokenizer, vocabulary = load_tokenizer(folder)
    encoder = build_encoder(config, tokenizer)
    validator = span_validator(config, encoder, vocabulary)
    return validator, encoder, validator.embed(encoder)


def test_a_score_is_not_fooled_by_what_only_touching_spans_share(tmp_path):
    rng = random.Random(0)
    known = ["".join(rng.choices("abcdefghijklmnop", k=4)) for _ in range(400)]

    def passage(words):
        return rng.choices(rng.sample(known, 3), k=words)

    texts = {
        "one topic each": [" ".join(passage(120)) for _ in range(40)],
        "a topic a passage": [" ".join(word for _ in range(8) for word in passage(15)) for _ in range(40)],
    }
    scores = {}
    for name, documents in texts.items():
        validator, encoder, held_out = scored(tmp_path / name, ["train " * 60, *documents])
        table = validator.held_out.shards.take(validator.rows)
        touching = encoder.eval().embed(validator.collator.batch(table, np.full(len(table), 2**32 - 1)))
        assert torch.equal(torch.cat(held_out[:2]), touching.double()), "the touching spans are those of the collator"
        scores[name] = validator.scores(encoder)
        assert held_out.reached.all()
    one, many = scores.values()
    assert min(one["recall_at_1"], one["distant_recall_at_1"], many["recall_at_1"]) > 0.3
    assert many["distant_recall_at_1"] < 0.1
    assert many["distant_mrr"] < many["mrr"] / 2
