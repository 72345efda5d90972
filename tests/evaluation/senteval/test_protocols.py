"""Protocols against the plain writing of the released ones, on small tables."""

import numpy as np
import pytest
import released as plain
from messages import all_of

from declutr.evaluation.senteval.classifier import protocols
from declutr.evaluation.senteval.classifier.classifier import examples
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import pair_table, table
from declutr.evaluation.senteval.scores.scoring import Pairs, bins, relatedness

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = ClassifierConfig(
    num_folds=2, max_epoch=4, epoch_size=1, tenacity=0, batch_size=16, decays=(1e-5, 0.1), learning_rate=0.03
)


@pytest.fixture(scope="module")
def pairs():
    """Two embeddings of 150 pairs, and classes that their difference tells with some noise."""
    stream = np.random.RandomState(0)
    first = stream.randn(150, 6).astype(np.float32)
    second = (first + stream.randn(150, 6) * stream.uniform(0.2, 2, (150, 1))).astype(np.float32)
    labels = (np.abs(first - second).mean(1) + 0.2 * stream.randn(150) > 0.8).astype(int)
    return first, second, labels


def test_inner_kfold_equals_a_plain_writing(pairs):
    first, _, _ = pairs
    labels = (first.sum(1) + np.random.RandomState(1).randn(150) > 1).astype(int)
    found = protocols.inner_kfold(examples(table(first), labels), 2, CONFIG)
    dev, accuracy, folds = plain.inner_kfold(first, labels, 2, CONFIG)
    assert (found.dev_accuracy, found.accuracy, list(found.fold_accuracies)) == (dev, accuracy, folds)


def test_kfold_of_pairs_equals_a_plain_writing(pairs):
    first, second, labels = pairs
    made = np.c_[np.abs(first - second), first * second]
    parts = [examples(pair_table(first[s], second[s]), labels[s]) for s in (slice(110), slice(110, None))]
    found = protocols.kfold(*parts, 2, CONFIG)
    dev, accuracy, answers = plain.kfold(made[:110], labels[:110], made[110:], labels[110:], 2, CONFIG)
    assert (found.dev_accuracy, found.accuracy) == (dev, accuracy)
    true = ((answers == 1) & (labels[110:] == 1)).sum()
    assert found.f1 == round(200 * true / ((answers == 1).sum() + (labels[110:] == 1).sum()), 2)


@pytest.mark.parametrize("config", [CONFIG, CONFIG.for_snli()])
def test_split_of_pairs_with_both_sides_equals_a_plain_writing(pairs, config):
    first, second, labels = pairs
    made = np.c_[first, second, first * second, np.abs(first - second)]
    ends = {"train": slice(90), "dev": slice(90, 120), "test": slice(120, None)}
    parts = [examples(pair_table(first[s], second[s], keep_both=True), labels[s]) for s in ends.values()]
    found = protocols.split(*parts, 2, config)
    expected = plain.split({name: (made[s], labels[s]) for name, s in ends.items()}, 2, config)
    assert (found.dev_accuracy, found.accuracy) == expected


def test_relatedness_equals_a_plain_writing(pairs):
    first, second, _ = pairs
    first, second = first[:24], second[:24]
    scores = np.clip(5 - 2 * np.abs(first - second).mean(1).astype(float), 1, 5)
    held = {"train": (first, second), "dev": (first[::2], second[::2]), "test": (first[1::2], second[1::2])}
    gold = {"train": scores, "dev": scores[::2], "test": scores[1::2]}
    found = relatedness(*[Pairs(pair_table(*held[name]), gold[name]) for name in held])
    parts = {name: (np.c_[np.abs(a - b), a * b], gold[name]) for name, (a, b) in held.items()}
    expected = plain.relatedness(parts, bins(scores))
    assert (found.dev_pearson, found.pearson, found.spearman) == pytest.approx(expected, abs=1e-4)


def test_relatedness_of_an_encoder_that_has_collapsed_is_zero():
    scores = np.linspace(1, 5, 40)
    same = Pairs(pair_table(np.ones((40, 3)), np.ones((40, 3))), scores)
    found = relatedness(same, same, same)
    assert (found.dev_pearson, found.pearson, found.spearman) == (0, 0, 0)
    assert found.num_passes == 250  # the first is the best, four more miss it


def test_scores_of_another_column_are_refused():
    with pytest.raises(ValueError, match=all_of("0 to 5", "1.0 to 4934.0", "column")):
        Pairs(pair_table(np.ones((2, 3)), np.ones((2, 3))), np.array([1.0, 4934.0]))
    with pytest.raises(ValueError, match="one shape"):
        pair_table(np.ones((2, 3)), np.ones((3, 3)))
