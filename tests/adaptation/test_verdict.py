"""Choice and verdict: what they say of nothing, and of a planted gain."""

import numpy as np
import pytest
from messages import says

from declutr.adaptation.scores import DISTANT, PAIRS, choose, judge

NAMES = [f"candidate {number}" for number in range(6)]
DOCUMENTS = 250


def values(rng, size=DOCUMENTS, gain=0.0, base=None):
    """Recall of documents, most of it shared with `base`."""
    shared = rng.beta(1, 3, size) if base is None else base
    return np.clip(shared + rng.normal(0, 0.1, size) + gain, 0, 1)


def experiment(rng, gain):
    """Start and candidates on development and test documents; with no gain, start and candidate are exchangeable."""
    halves = []
    for _ in ("development", "test"):
        base = rng.beta(1, 3, DOCUMENTS)
        start = values(rng, base=base)
        found = {}
        for name in NAMES:
            other = values(rng, base=base, gain=gain)
            swap = rng.random(DOCUMENTS) < 0.5 if gain == 0 else np.zeros(DOCUMENTS, bool)
            found[name] = {DISTANT: np.where(swap, start, other)}
        halves.append(({DISTANT: start}, found))
    return halves


def outcome(rng, gain, seed):
    (_, development), (start, test) = experiment(rng, gain)
    chosen = choose(NAMES, development, DISTANT, seed)
    return judge(start, test[chosen], DISTANT, seed).outcome


@pytest.mark.slow
def test_judge_says_better_of_nothing_at_most_as_often_as_it_may():
    """Without a difference, 2.5% of the intervals are above 0: 1 of 40; 4 or more of 20 have a probability of 0.2%."""
    rng = np.random.default_rng(0)
    outcomes = [outcome(rng, 0.0, seed) for seed in range(20)]
    assert outcomes.count("better") <= 3


@pytest.mark.slow
def test_judge_finds_a_planted_gain():
    rng = np.random.default_rng(0)
    assert [outcome(rng, 0.04, seed) for seed in range(10)].count("better") >= 8


def test_choose_takes_the_cheapest_that_no_dearer_one_exceeds():
    rng = np.random.default_rng(0)
    base = rng.beta(2, 2, DOCUMENTS)
    table = {name: {DISTANT: base + rng.normal(0, 0.02, DOCUMENTS)} for name in NAMES}
    assert choose(NAMES, table, DISTANT, 0) == NAMES[0]
    table[NAMES[3]] = {DISTANT: base + 0.05}
    assert choose(NAMES, table, DISTANT, 0) == NAMES[3]
    table[NAMES[5]] = {DISTANT: base + 0.1}
    assert choose(NAMES, table, DISTANT, 0) == NAMES[5]


def test_judge_says_how_many_documents_a_point_needs():
    rng = np.random.default_rng(1)
    base = rng.beta(2, 2, 400)
    verdict = judge({DISTANT: base}, {DISTANT: base + rng.normal(0, 0.2, 400)}, DISTANT, 0)
    assert verdict.outcome == "no measurable difference"
    low, high = verdict.comparison.interval
    assert verdict.rows_needed == round(400 * ((high - low) / 0.02) ** 2)
    says(verdict.sentence("documents"), f"{verdict.rows_needed:,} test documents")


@pytest.mark.parametrize(("shift", "told"), [(0.1, "better"), (-0.1, "worse")])
def test_judge_of_a_clear_difference_names_its_direction(shift, told):
    base = np.random.default_rng(0).beta(2, 2, 120)
    verdict = judge({DISTANT: base}, {DISTANT: base + shift}, DISTANT, 0)
    assert verdict.outcome == told
    says(verdict.sentence("documents"), f"{100 * shift:+.1f} points", "95% interval")


def test_judge_of_fewer_than_a_hundred_documents_tells_nothing():
    base = np.random.default_rng(0).beta(2, 2, 99)
    verdict = judge({DISTANT: base}, {DISTANT: base + 0.1}, DISTANT, 0)
    assert verdict.outcome == "too few documents to tell"
    assert verdict.rows_needed is None
    says(verdict.sentence("documents"), "99 test documents", "100")


def test_judge_and_choose_of_five_queries_that_changed_find_no_difference():
    start = np.zeros(200)
    after = start.copy()
    after[:5] = 1
    verdict = judge({PAIRS: start}, {PAIRS: after}, PAIRS, 0)
    assert verdict.outcome == "no measurable difference"
    says(verdict.sentence("queries"), "queries that differ: 5", "needs 6")
    assert "would need" not in verdict.sentence("queries")
    assert choose(["a", "b"], {"a": {PAIRS: start}, "b": {PAIRS: after}}, PAIRS, 0) == "a"
