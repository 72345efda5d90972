"""Folds and orders are those of scikit-learn and of numpy's global generator."""

import numpy as np
import pytest
from messages import all_of
from sklearn.model_selection import StratifiedKFold

from declutr.evaluation.senteval.classifier.features import TrainingSet, hold_out, orders, stratified_folds


@pytest.mark.parametrize(
    ("counts", "num_folds", "seed"),
    [((531, 529), 10, 1111), ((7, 40, 13), 5, 1111), ((3, 30), 10, 1111), ((50, 2, 9, 31, 18, 25), 7, 5), ((4,), 4, 0)],
)
@pytest.mark.filterwarnings("ignore:The least populated class:UserWarning")
@pytest.mark.parametrize("sorted_labels", [True, False])
def test_folds_are_scikit_learns(counts, num_folds, seed, sorted_labels):
    labels = np.repeat(np.arange(len(counts))[::-1], counts[::-1])
    if not sorted_labels:
        labels = np.random.RandomState(3).permutation(labels)
    theirs = StratifiedKFold(num_folds, shuffle=True, random_state=seed).split(np.zeros(len(labels)), labels)
    ours = stratified_folds(labels, num_folds, seed)
    for (our_train, our_test), (their_train, their_test) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our_train, their_train)
        np.testing.assert_array_equal(our_test, their_test)


@pytest.mark.parametrize("num_folds", [1, 6])
def test_more_folds_than_rows_of_any_class_are_refused(num_folds):
    with pytest.raises(ValueError, match=all_of(f"num_folds = {num_folds}", "at least 2", "at most 5")):
        stratified_folds([0] * 5 + [1] * 3, num_folds)


def test_held_out_rows_and_orders_are_those_of_the_global_generator():
    """What the official fit draws: once the split, then an order for each pass."""
    state = np.random.get_state()  # noqa: NPY002
    try:
        np.random.seed(1111)  # noqa: NPY002
        split = np.random.permutation(53)  # noqa: NPY002
        passes = [np.random.permutation(51) for _ in range(3)]  # noqa: NPY002
    finally:
        np.random.set_state(state)  # noqa: NPY002
    rows = np.arange(100, 153)
    held = hold_out(rows, 1111)
    np.testing.assert_array_equal(held.dev, rows[split[:2]])
    np.testing.assert_array_equal(held.train, rows[split[2:]])
    for expected, found in zip(passes, orders(1111, *held.stream), strict=False):
        np.testing.assert_array_equal(found, expected)


def test_the_global_generator_is_neither_read_nor_moved():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    stratified_folds([0, 1] * 10, 2)
    hold_out(np.arange(40), 1)
    next(orders(1, 0, 9))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_too_few_rows_to_hold_any_out_are_refused():
    with pytest.raises(ValueError, match=all_of("5%", "at least 20 rows")):
        hold_out(np.arange(19), 1111)
    with pytest.raises(ValueError, match="0 and 1"):
        TrainingSet(np.arange(0), np.arange(1))
