"""Paired comparison over seeds against SciPy's test, and what is left out."""

import numpy as np
import pytest
from scipy import stats

from declutr.reproduction.item import Cell
from declutr.reproduction.table import compare_labels, difference_row

AXES = [Cell({"terms": terms, "share": share}, {}) for terms in ("both", "mlm") for share in ("all", "half")]


def numbers(seeds=5, effect=1.0):
    """Numbers that depend mostly on the seed, as those of runs with the same documents do."""
    rng = np.random.default_rng(0)
    luck = 10 * rng.standard_normal(seeds)
    return {
        cell.name: {
            seed: float(luck[seed] + (effect if cell.labels["terms"] == "both" else 0) + rng.standard_normal())
            for seed in range(seeds)
        }
        for cell in AXES
    }


def averaged(*given):
    return [one for one in compare_labels(*given) if not one.within]


def test_labels_are_compared_as_by_a_paired_t_test():
    given = numbers()
    one, other = averaged(AXES, given)
    assert (one.axis, one.label, one.base, one.seeds) == ("terms", "mlm", "both", 5)
    assert (other.axis, other.label, other.base) == ("share", "half", "all")
    means = {
        terms: np.mean([list(given[f"{terms}, {share}"].values()) for share in ("all", "half")], axis=0)
        for terms in ("both", "mlm")
    }
    expected = stats.ttest_rel(means["mlm"], means["both"])
    interval = expected.confidence_interval(0.95)
    assert one.difference == pytest.approx((means["mlm"] - means["both"]).mean())
    assert one.p == pytest.approx(expected.pvalue)
    assert one.interval == pytest.approx((interval.low, interval.high))


def test_a_large_effect_is_measurable_and_none_is_not():
    assert compare_labels(AXES, numbers(effect=20.0))[0].measurable
    assert not compare_labels(AXES, numbers(effect=0.0))[0].measurable


def test_only_seeds_with_all_runs_count():
    given = numbers()
    del given["mlm, half"][3]
    assert [one.seeds for one in averaged(AXES, given)] == [4, 4]
    given["both, all"] = {}
    assert averaged(AXES, given) == []


def test_labels_of_two_axes_are_compared_within_each_label_of_the_other():
    given = numbers()
    found = {(one.label, one.within): one for one in compare_labels(AXES, given)}
    assert len(found) == 6
    for share in ("all", "half"):
        one, other = (list(given[f"{terms}, {share}"].values()) for terms in ("mlm", "both"))
        assert found["mlm", share].difference == pytest.approx(np.mean(one) - np.mean(other))
        assert found["mlm", share].p == pytest.approx(stats.ttest_rel(one, other).pvalue)
    three = [Cell(cell.labels | {"third": "x"}, {}) for cell in AXES]
    assert all(not one.within for one in compare_labels(three, {f"{name}, x": one for name, one in given.items()}))


def test_only_combinations_that_both_labels_have_are_compared():
    """Else the other axes' effects would count as those of the label."""
    given, part = numbers(), [cell for cell in AXES if cell.name != "both, half"]
    one, other = averaged(part, given)
    pairs = (given["mlm, all"].values(), given["both, all"].values())
    assert one.difference == pytest.approx(np.mean([mlm - both for mlm, both in zip(*pairs, strict=True)]))
    assert (one.label, other.label) == ("mlm", "half")
    apart = [cell for cell in AXES if cell.name in ("both, all", "mlm, half")]
    assert compare_labels(apart, given) == []


@pytest.mark.parametrize("effect", [0.0, 0.1, 40.1])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_few_numbers_or_equal_differences_have_neither_interval_nor_p(seeds, effect):
    """Differences that are equal but for rounding, such as 0.3 - 0.2 and 0.2 - 0.1, vary by nothing."""
    equal = {
        cell.name: {seed: 0.1 * seed + effect * (cell.labels["terms"] == "mlm") for seed in range(seeds)}
        for cell in AXES
    }
    one = compare_labels(AXES, equal)[0]
    assert one.difference == pytest.approx(effect)
    assert (one.p, one.interval, one.measurable) == (None, None, False)
    assert ("(one seed)" if seeds == 1 else "(not measurable)") in difference_row(one)


def test_every_label_of_every_axis_is_compared_with_the_start():
    start = dict.fromkeys(range(5), 7.0)
    found = averaged([Cell({}, {}), *AXES], numbers() | {"start": start})
    assert [(one.axis, one.label, one.base) for one in found] == [
        *[("terms", "mlm", "both"), ("terms", "both", "start"), ("terms", "mlm", "start")],
        *[("share", "half", "all"), ("share", "all", "start"), ("share", "half", "start")],
    ]
    assert [one for one in found if one.base != "start"] == averaged(AXES, numbers())
    gains = {one.label: one.difference for one in found if one.base == "start"}
    assert gains["mlm"] - gains["both"] == pytest.approx(found[0].difference)


def test_pairs_of_an_axis_are_compared_in_place_of_its_first_label():
    cells = [Cell({}, {}), *(Cell({"method": name}, {}) for name in ("first", "one", "other"))]
    start, first = dict.fromkeys((0, 1), 1.0), {0: 2.0, 1: 1.0}
    given = {"start": start, "first": first, "one": {0: 3.0, 1: 4.0}, "other": {0: 2.5, 1: 3.0}}
    pairs = [("one", "other"), ("one", "of a cell that is not run")]
    found = compare_labels(cells, given, pairs)
    assert [(one.label, one.base, one.difference) for one in found] == [
        ("one", "other", 0.75),
        ("first", "start", 0.5),
        ("one", "start", 2.5),
        ("other", "start", 1.75),
    ]
    of_other_axis = [("a", "b")]
    assert [one.base for one in compare_labels(cells, given, of_other_axis)] == ["first", "first", *["start"] * 3]
    part = [cell for cell in cells if cell.name != "other"]
    assert [(one.label, one.base) for one in compare_labels(part, given, pairs)] == [
        ("first", "start"),
        ("one", "start"),
    ]
