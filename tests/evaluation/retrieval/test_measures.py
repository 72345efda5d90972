"""Measures of retrieval and lexical scores against plain writings."""

import math
import re
from collections import Counter

import numpy as np
import pytest
from scipy.stats import rankdata
from sklearn.metrics import ndcg_score

from declutr.evaluation.retrieval.compare import MEASURES, measures, positions
from declutr.evaluation.retrieval.lexicon import Lexicon

TEXTS = ["the cat sat on the mat", "a dog", "dogs and cats and dogs", "the the the", "nothing in common", "Cat!"]
QUERIES = ["the cat", "dogs, dogs", "unknown words", "mat and the mat"]


def drawn(queries=30, texts=40, ties=False):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(queries, texts))
    relevant = [sorted(rng.choice(texts, size=rng.integers(1, 14), replace=False).tolist()) for _ in range(queries)]
    return (scores.round(1) if ties else scores), relevant


def test_ndcg_equals_scikit_learn():
    scores, relevant = drawn()
    truth = np.zeros_like(scores)
    for row, wanted in enumerate(relevant):
        truth[row, wanted] = 1
    found = measures(scores, relevant)[:, MEASURES.index("ndcg@10")]
    expected = [ndcg_score(truth[row : row + 1], scores[row : row + 1], k=10) for row in range(len(scores))]
    assert np.abs(found - expected).max() < 1e-12


def test_measures_equal_a_plain_writing():
    scores, relevant = drawn()
    for values, wanted, found in zip(scores, relevant, measures(scores, relevant), strict=True):
        order = sorted(range(len(values)), key=lambda place: -values[place])
        for k in (1, 5, 10):
            assert found[MEASURES.index(f"recall@{k}")] == pytest.approx(len({*order[:k]} & {*wanted}) / len(wanted))
        first = next(place for place, text in enumerate(order, 1) if text in wanted)
        assert found[MEASURES.index("mrr")] == pytest.approx(1 / first)


def test_positions_of_ties_count_half():
    scores, relevant = drawn(ties=True)
    for values, wanted in zip(scores, relevant, strict=True):
        if len(wanted) == 1:
            assert positions(values, wanted).tolist() == [rankdata(-values)[wanted[0]]]
    assert positions(np.zeros(11), [3]).tolist() == [6.0]  # an encoder that tells nothing apart finds nothing


def words(text):
    return re.findall(r"\w+", text.lower())


def test_bm25_equals_a_plain_writing():
    counts = [Counter(words(text)) for text in TEXTS]
    lengths = [sum(count.values()) for count in counts]
    mean = sum(lengths) / len(lengths)
    found = Lexicon(TEXTS).bm25(QUERIES)
    for row, query in enumerate(QUERIES):
        for column, count in enumerate(counts):
            total = 0.0
            for word in set(words(query)):
                having = sum(word in each for each in counts)
                rarity = math.log(1 + (len(TEXTS) - having + 0.5) / (having + 0.5))
                norm = 1.2 * (0.25 + 0.75 * lengths[column] / mean)
                total += rarity * count[word] * 2.2 / (count[word] + norm)
            assert found[row, column] == pytest.approx(total, abs=1e-5)


def test_idf_cosine_equals_a_plain_writing():
    counts = [Counter(words(text)) for text in TEXTS]
    rarity = {w: math.log(1 + len(TEXTS) / sum(w in each for each in counts)) for count in counts for w in count}

    def vector(count):
        return {w: (1 + math.log(n)) * rarity[w] for w, n in count.items() if w in rarity}

    found = Lexicon(TEXTS).idf_cosine(QUERIES)
    for row, query in enumerate(QUERIES):
        own = vector(Counter(words(query)))
        for column, count in enumerate(counts):
            other = vector(count)
            dot = sum(own[w] * other.get(w, 0) for w in own)
            norms = math.hypot(*own.values()) * math.hypot(*other.values())
            assert found[row, column] == pytest.approx(dot / norms if norms else 0.0, abs=1e-6)


def test_lexicon_of_texts_without_words_scores_nothing():
    assert not Lexicon(["...", "!"]).bm25(["a", "!"]).any()
    assert not Lexicon(["...", "!"]).idf_cosine(["a", "!"]).any()
