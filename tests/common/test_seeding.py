"""Draws that depend on their position alone, and intervals by the paired bootstrap."""

import ast
import hashlib
from pathlib import Path

import numpy as np
import pytest
from messages import says
from scipy.stats import spearmanr

from declutr.common import bootstrap, seeding
from declutr.common.bootstrap import MIN_ROWS, Comparison, compare, mean, paired_interval, spearman
from declutr.trainer.objectives.declutr.validator import DISTANT


def test_philox_gives_the_known_answers():
    """The three vectors of Random123's kat_vectors for philox4x32-10."""
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    for counter, key, answer in (
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (digits, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ):
        words = seeding.philox(key, tuple(np.array([c], np.uint64) for c in counter))
        assert " ".join(f"{word:08x}" for word in words[0]) == answer


def test_a_row_depends_on_its_position_alone():
    rng = np.random.default_rng(0)
    major, minor = (rng.integers(0, high, 20, dtype=np.uint64) for high in (2**64, 2**32))
    together = seeding.words(7, "spans", major, minor, 13)
    order = np.random.default_rng(1).permutation(20)
    assert (seeding.words(7, "spans", major[order], minor[order], 13) == together[order]).all()
    assert (seeding.words(7, "spans", major[3:4], minor[3:4], 5)[0] == together[3, :5]).all()


def test_draws_stay_below_one_and_positions_and_seeds_have_their_places():
    """Every draw of a run depends on them: in blocks, the counter is (index, minor, low and high half of major)."""
    major, minor, index = (np.array([value], np.uint64) for value in (0x123456789ABCDEF0, 7, 11))
    counters = tuple(np.array([value], np.uint64) for value in (11, 7, 0x9ABCDEF0, 0x12345678))
    expected = seeding.philox(seeding.key_for(3, "spans"), counters)
    assert np.array_equal(seeding.blocks(3, "spans", major, minor, index), expected)
    assert np.array_equal(seeding.words(3, "spans", major, minor, 48)[0, 44:], expected[0])
    digest = hashlib.blake2b(b"3\0spans", digest_size=8).digest()
    assert seeding.key_for(3, "spans") == int.from_bytes(digest, "little")
    edges = seeding.unit(np.array([0, 2**32 - 1], np.uint32))
    assert (edges[0], int(edges[1]), int(edges[1] * (2**20 + 1))) == (0, 0, 2**20)
    digest = hashlib.blake2b(b"3\0dropout\0001\0002", digest_size=8).digest()
    assert seeding.torch_seed(3, "dropout", 1, 2) == int.from_bytes(digest, "little") // 2


PURPOSES = {
    "adaptation pairs", "adaptation split", "branch", "choosing half", "collapse", "corpus", "crop {view}",
    "difficult texts", "dropout", "frontend", "hashed-words", "held-out", "label {label}", "map", "mask {view}",
    "metric learning", "mixup", "mlm", "objective", "order", "paired bootstrap", "projection", "report", "scl",
    "share of the corpus", "spans", "text", "weights", "{purpose}, kinds",
}  # fmt: skip


def test_purposes_of_draws_stay_when_code_is_renamed():
    """A changed purpose changes every number drawn for it: splits, spans, masks, weights and dropout."""
    root, purposes = Path(seeding.__file__).parents[1], set()
    for package in ("adaptation", "common", "embedding", "encoders", "evaluation", "pipeline", "report", "trainer"):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if "seeding." in text else ():
                name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
                if name in ("blocks", "key_for", "torch_seed", "words") and ast.unparse(node.func) == f"seeding.{name}":
                    purposes.add(ast.unparse(node.args[1]).lstrip("f").strip("'"))
    assert purposes - {"purpose"} | {"spans"} == PURPOSES
    assert DISTANT == "distant spans"


def paired(rows=400, gain=0.1, seed=0):
    """Values of two encoders whose rows are alike: hard rows are hard for both."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, 1, rows)
    return hard + rng.normal(0, 0.1, rows), hard + gain + rng.normal(0, 0.1, rows)


def test_the_interval_of_a_mean_is_that_of_the_paired_differences_of_rows_with_both_values():
    """Unpaired rows would give one seven times as wide: a row deviates by 1, a difference by 0.14."""
    before, after = paired()
    low, high = paired_interval(before, after, seed=3)
    difference = after - before
    half = 1.96 * difference.std() / np.sqrt(len(difference))
    assert (low, high) == pytest.approx((difference.mean() - half, difference.mean() + half), abs=0.15 * half)
    assert compare(before, after, 1) == compare(before.copy(), after.copy(), 1)
    assert compare(before, after, 1).interval != compare(before, after, 2).interval
    before[0], after[1] = np.nan, np.nan
    comparison = compare(before, after, 0)
    assert comparison == compare(before[2:], after[2:], 0)
    assert (comparison.rows, comparison.before) == (398, mean(before[2:]))


def test_spearman_is_that_of_scipy_and_its_rows_are_drawn_in_pairs():
    rng = np.random.default_rng(5)
    gold = rng.integers(0, 6, 300).astype(float)
    noisy, better = ((gold + rng.normal(0, noise, 300)).round(1) for noise in (3, 1))
    before, after = np.stack([noisy, gold], axis=1), np.stack([better, gold], axis=1)
    assert spearman(before) == pytest.approx(spearmanr(noisy, gold).statistic, abs=1e-12)
    assert spearman(np.zeros((4, 2))) == 0
    comparison = compare(before, after, 0, spearman)
    assert comparison.measurable
    assert comparison.difference == pytest.approx(spearman(after) - spearman(before))
    assert comparison.interval[0] < comparison.difference < comparison.interval[1]


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_errors_of_items_are_those_of_drawing_items_anew(scale):
    """The standard error of a difference of Spearman correlations with tied gold scores, and of a mean."""
    gold = np.arange(600) % 6
    rng = np.random.default_rng(0)
    values = [np.stack([gold + noise * rng.normal(size=600), gold], axis=1) for noise in (scale, 1.0)]
    errors = np.subtract(*(bootstrap.item_errors(bootstrap.spearman_influence(side)) for side in values))
    drawn = [rng.integers(0, 600, 600) for _ in range(1000)]
    expected = np.std([spearman(values[0][rows]) - spearman(values[1][rows]) for rows in drawn])
    assert np.sqrt(errors @ errors) == pytest.approx(100 * expected, rel=0.08)
    right = (gold < 2).astype(float)
    assert np.square(bootstrap.item_errors(right)).sum() == pytest.approx(100**2 * right.var() / 599)
    assert not bootstrap.spearman_influence(np.zeros((4, 2))).any()


def test_comparison_sentence_has_difference_interval_and_rows():
    says(Comparison(0.25, 0.5, 150, (0.2, 0.3)).sentence(), "+0.2500", "95%", "+0.2000", "+0.3000", "150 rows): better")
    assert Comparison(0.5, 0.25, 150, (-0.3, -0.2)).sentence().endswith(": worse")
    says(Comparison(0.25, 0.25, 150, (-0.1, 0.1)).sentence(), "150 rows", "no measurable difference")
    assert Comparison(0.25, 0.25, 150, (0.0, 0.0)).sentence().endswith("measurable difference")
    # of five rows that differ chance gives all the same sign with 2 * 0.5^5 = 6%
    few, enough = (compare(np.zeros(200), (np.arange(200) < changed).astype(float), 0) for changed in (5, 6))
    assert (few.interval[0] > 0, few.measurable, enough.measurable) == (True, False, True)
    assert few.sentence().endswith(": no measurable difference, 5 rows differ and it needs 6")
    short = compare(*paired(MIN_ROWS - 1), 0)
    assert (short.interval, compare(*paired(MIN_ROWS), 0).measurable) == (None, True)
    says(short.sentence(), "at least 100")
    with pytest.raises(ValueError, match="same rows"):
        compare(np.ones(3), np.ones(4), 0)
    for empty in (np.empty(0), np.empty((0, 2))):
        says(compare(empty, empty, 0).sentence("pairs"), "none of the pairs")
