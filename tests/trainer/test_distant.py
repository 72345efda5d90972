"""Distant spans of held-out documents: their bounds for any geometry, their laws, and what the scores of them tell."""

import random

import numpy as np
import pytest
import tinyruns as runs
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepared import Row, write_prepared
from tinyruns import span_validator

from declutr.trainer.objectives.declutr.objective import DISTANT, place_distant
from declutr.trainer.objectives.declutr.spans import draw, pair_lengths
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.setup.build import build_encoder, load_tokenizer


def pairs(config, lengths, longest, seed=0, keys=None):
    """Starts and ends of anchors and of positives, `(n, 2)` each, and which are as far apart as they should be."""
    keys = np.arange(len(lengths), dtype=np.uint64) if keys is None else keys
    draws = draw(config, seed, np.zeros(len(lengths), np.int64), keys, DISTANT)
    windows = np.stack([np.zeros_like(longest), longest], axis=1).reshape(-1)  # as documents with short spans have them
    sizes = pair_lengths(config, draws, windows, 2 * np.arange(len(longest) + 1), "shrink_spans")
    spans, reached = place_distant(draws, lengths, sizes, config.max_tokens)
    assert spans.present.all()
    return spans.anchors[:, 0], spans.positives[:, 0, 0], reached


def gap(anchors, positives):
    return np.maximum(anchors[:, 0], positives[:, 0]) - np.minimum(anchors[:, 1], positives[:, 1])


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
    between = gap(anchors, positives)
    assert (between >= 0).all()
    assert (reached == (between >= config.max_tokens)).all()
    assert reached[lengths >= 2 * longest + config.max_tokens].all()
    for short in np.flatnonzero(~reached):  # as far apart as the document allows: at its two ends
        ends = np.concatenate([anchors[short], positives[short]])
        assert (ends.min(), ends.max()) == (0, lengths[short])


def test_lengths_follow_the_laws_of_all_spans_and_places_are_spread():
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=64, strategy="adjacent")
    lengths, longest = np.full(4000, 1000), np.full(4000, 64)
    anchors, positives, reached = pairs(config, lengths, longest)
    assert reached.all()
    for spans, mean in ((anchors, 4 / 6), (positives, 2 / 6)):
        assert (spans[:, 1] - spans[:, 0]).mean() == pytest.approx(8 + mean * 56, abs=1)
    assert (anchors[:, 0] < positives[:, 0]).mean() == pytest.approx(0.5, abs=0.03)
    first, last = np.minimum(anchors, positives)[:, 0], np.maximum(anchors, positives)[:, 1]
    left = 1000 - 64 - (anchors[:, 1] - anchors[:, 0]) - (positives[:, 1] - positives[:, 0])
    assert (first / left).mean() == pytest.approx(1 / 3, abs=0.02)  # what is left: a third before, between, behind
    assert ((1000 - last) / left).mean() == pytest.approx(1 / 3, abs=0.02)


def test_a_documents_spans_are_its_own_and_the_seeds():
    config = SpanConfig(num_anchors=1, num_positives=1, min_tokens=8, max_tokens=64, strategy="adjacent")
    lengths, longest = np.array([300, 900, 5000]), np.full(3, 64)
    keys = np.array([5, 6, 7], np.uint64)
    together = pairs(config, lengths, longest, 3, keys)
    for number in range(3):
        own = slice(number, number + 1)
        alone = pairs(config, lengths[own], longest[own], 3, keys[own])
        assert all(np.array_equal(one, every[own]) for one, every in zip(alone, together, strict=True))
    assert not np.array_equal(pairs(config, lengths, longest, 4, keys)[0], together[0])


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
        table = validator.shards.take(validator.rows)
        touching = encoder.eval().embed(validator.collator.batch(table, np.full(len(table), 2**32 - 1)))
        assert torch.equal(torch.cat(held_out[:2]), touching.double()), "the touching spans are those of the collator"
        scores[name] = held_out.scores(np.arange(len(held_out.anchors), dtype=np.uint64))
        assert held_out.reached.all()
    one, many = scores.values()
    assert min(one["recall_at_1"], one["distant_recall_at_1"], many["recall_at_1"]) > 0.3
    assert many["distant_recall_at_1"] < 0.1
    assert many["distant_mrr"] < many["mrr"] / 2
