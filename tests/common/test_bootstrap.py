"""The paired bootstrap against the closed form and scipy, and what it says of few or missing rows."""

import numpy as np
import pytest
from messages import says
from scipy.stats import spearmanr

from declutr.common.bootstrap import MIN_ROWS, Comparison, compare, mean, paired_interval, spearman


def paired(rows=400, gain=0.1, seed=0):
    """Values of two encoders whose rows are alike: hard rows are hard for both."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, 1, rows)
    return hard + rng.normal(0, 0.1, rows), hard + gain + rng.normal(0, 0.1, rows)


def test_the_interval_of_a_mean_is_that_of_the_paired_differences():
    """Unpaired rows would give one seven times as wide: a row deviates by 1, a difference by 0.14."""
    before, after = paired()
    low, high = paired_interval(before, after, seed=3)
    difference = after - before
    half = 1.96 * difference.std() / np.sqrt(len(difference))
    assert (low, high) == pytest.approx((difference.mean() - half, difference.mean() + half), abs=0.15 * half)


def test_the_same_values_give_the_same_interval_and_another_seed_another():
    before, after = paired()
    assert compare(before, after, 1) == compare(before.copy(), after.copy(), 1)
    assert compare(before, after, 1).interval != compare(before, after, 2).interval


def test_spearman_is_that_of_scipy_and_its_rows_are_drawn_in_pairs():
    rng = np.random.default_rng(5)
    gold = rng.integers(0, 6, 300).astype(float)
    noisy, better = ((gold + rng.normal(0, noise, 300)).round(1) for noise in (3, 1))
    before, after = np.stack([noisy, gold], axis=1), np.stack([better, gold], axis=1)
    assert spearman(before) == pytest.approx(spearmanr(noisy, gold).statistic, abs=1e-12)
    assert spearman(np.zeros((4, 2))) == 0
    found = compare(before, after, 0, spearman)
    assert found.measurable
    assert found.difference == pytest.approx(spearman(after) - spearman(before))
    assert found.interval[0] < found.difference < found.interval[1]


def test_a_row_that_lacks_a_value_is_left_out_on_both_sides():
    before, after = paired()
    before[0], after[1] = np.nan, np.nan
    found = compare(before, after, 0)
    assert found == compare(before[2:], after[2:], 0)
    assert (found.rows, found.before) == (398, mean(before[2:]))


@pytest.mark.parametrize(("rows", "some"), [(MIN_ROWS - 1, False), (MIN_ROWS, True)])
def test_few_rows_have_no_interval(rows, some):
    found = compare(*paired(rows), 0)
    assert (found.interval is not None, found.measurable) == (some, some)
    assert ("at least 100" in found.sentence()) is not some


@pytest.mark.parametrize(("changed", "measurable"), [(5, False), (6, True)])
def test_compare_of_fewer_than_six_rows_that_differ_is_not_measurable(changed, measurable):
    """The interval excludes 0 with both; of five differences chance gives all the same sign with 2 * 0.5^5 = 6%."""
    before = np.zeros(200)
    after = before.copy()
    after[:changed] = 1
    found = compare(before, after, 0)
    assert found.interval[0] > 0
    assert found.measurable is measurable
    told = "better" if measurable else "no measurable difference, 5 rows differ and it needs 6"
    assert found.sentence().endswith(f": {told}")


def test_comparison_sentence_has_difference_interval_and_rows():
    says(Comparison(0.25, 0.5, 150, (0.2, 0.3)).sentence(), "+0.2500", "95%", "+0.2000", "+0.3000", "150 rows): better")
    assert Comparison(0.5, 0.25, 150, (-0.3, -0.2)).sentence().endswith(": worse")
    says(Comparison(0.25, 0.25, 150, (-0.1, 0.1)).sentence(), "150 rows", "no measurable difference")
    assert Comparison(0.25, 0.25, 150, (0.0, 0.0)).sentence().endswith("measurable difference")
    with pytest.raises(ValueError, match="same rows"):
        compare(np.ones(3), np.ones(4), 0)


@pytest.mark.parametrize("empty", [np.empty(0), np.empty((0, 2))])
def test_compare_without_rows_is_not_comparable(empty):
    says(compare(empty, empty, 0).sentence(), "no row")
