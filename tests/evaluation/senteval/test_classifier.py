"""Fits side by side end where each of them ends alone."""

import itertools

import numpy as np
import pytest
import released as plain
import torch
from messages import all_of

from declutr.evaluation.senteval.classifier.classifier import examples, fit_many
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import TrainingSet, table

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIGS = {
    "adam": ClassifierConfig(max_epoch=7, batch_size=16, tenacity=0, learning_rate=0.1, epoch_size=1),
    "rmsprop": ClassifierConfig(optimizer="rmsprop", max_epoch=12, epoch_size=2, tenacity=0, batch_size=16),
    "hidden": ClassifierConfig(num_hidden=7, max_epoch=9, batch_size=16, tenacity=0, learning_rate=0.05, epoch_size=1),
    "dropout": ClassifierConfig(
        num_hidden=9, dropout=0.3, max_epoch=5, batch_size=16, tenacity=0, learning_rate=0.1, epoch_size=1
    ),
}
DECAYS = (1e-5, 1e-2, 0.1)


@pytest.fixture(scope="module")
def data():
    stream = np.random.RandomState(0)
    labels = stream.randint(0, 3, 130)
    means = stream.randn(3, 12)
    return (means[labels] + 2.5 * stream.randn(130, 12)).astype(np.float32), labels


def some_sets(num_sets, stream):
    """Sets of unlike sizes: passes of three and of four batches, full and nearly empty last ones, shared streams."""
    sizes = itertools.cycle((47, 48, 49, 47, 64, 33))
    found = []
    for size in itertools.islice(sizes, num_sets):
        drawn = stream.permutation(130)
        found.append(TrainingSet(drawn[:size], drawn[size : size + 20 + size % 3]))
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_every_fit_is_the_fit_alone(data, name):
    features, labels = data
    config = CONFIGS[name]
    sets = some_sets(6, np.random.RandomState(1))
    held = examples(table(features), labels)
    fits = fit_many(held, held, sets, DECAYS, config, 3)
    lengths = set()
    for (place, one), (number, decay) in itertools.product(enumerate(sets), enumerate(DECAYS)):
        alone = plain.Classifier(config, 3, decay)
        alone.fit(features[one.train], labels[one.train], (features[one.dev], labels[one.dev]))
        assert fits.accuracies()[place, number] == alone.score(features[one.dev], labels[one.dev])
        state = list(alone.model.parameters())
        for ours, theirs in zip(fits.network.parameters, state, strict=True):
            torch.testing.assert_close(ours[place, number], theirs.data, rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(fits.predict(place, number, held.features), alone.predict(features))
        lengths.add(int(fits.num_scores[place, number]))
    assert len(lengths) > 1, "fits that end at one time do not show that the others go on unharmed"


def test_sets_that_do_not_fit_in_memory_together_are_the_same(data):
    """1,500 wide rows: eleven sets of a batch of 64 make two blocks."""
    features, labels = data
    wide = np.tile(features, 125)
    sets = [TrainingSet(s.train[:33], s.dev) for s in some_sets(13, np.random.RandomState(2))]
    held = examples(table(wide), labels)
    config = ClassifierConfig(max_epoch=2, epoch_size=2, num_hidden=3, dropout=0.5)
    together = fit_many(held, held, sets, DECAYS[:1], config, 3)
    for place, one in enumerate(sets):
        alone = fit_many(held, held, [one], DECAYS[:1], config, 3)
        np.testing.assert_array_equal(together.num_right[place], alone.num_right[0])
        for ours, theirs in zip(together.network.parameters, alone.network.parameters, strict=True):
            torch.testing.assert_close(ours[place], theirs[0], rtol=1e-4, atol=1e-6)


def test_each_set_may_have_a_decay_of_its_own(data):
    features, labels = data
    held = examples(table(features), labels)
    sets, config = some_sets(3, np.random.RandomState(3)), CONFIGS["adam"]
    all_decays = fit_many(held, held, sets, DECAYS, config, 3)
    own = fit_many(held, held, sets, [[DECAYS[2]], [DECAYS[0]], [DECAYS[1]]], config, 3)
    for place, number in enumerate((2, 0, 1)):
        assert own.num_right[place, 0] == all_decays.num_right[place, number]
        torch.testing.assert_close(own.network.parameters[0][place, 0], all_decays.network.parameters[0][place, number])


def test_global_generators_are_neither_read_nor_moved(data):
    features, labels = data
    held = examples(table(features), labels)
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()  # noqa: NPY002
    fit_many(held, held, some_sets(2, np.random.RandomState(4)), DECAYS, CONFIGS["dropout"], 3)
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def test_wrong_data_are_refused_with_what_is_wrong(data):
    features, labels = data
    with pytest.raises(ValueError, match=all_of("130 embeddings", "129 labels")):
        examples(table(features), labels[1:])
    held = examples(table(features), labels)
    with pytest.raises(ValueError, match=all_of("train labels", "0 to 1", "[0, 1, 2]")):
        fit_many(held, held, some_sets(1, np.random.RandomState(5)), DECAYS, CONFIGS["adam"], 2)
    broken = features.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match=all_of("1 of 130 embeddings", "finite")):
        table(broken)
    with pytest.raises(ValueError, match=all_of("(rows, size)")):
        table(features[0])


def test_presets_are_the_published_ones():
    official, quick = ClassifierConfig.official(), ClassifierConfig.prototyping()
    assert (official.batch_size, official.tenacity, official.epoch_size, official.num_folds) == (64, 5, 4, 10)
    assert (quick.batch_size, quick.tenacity, quick.epoch_size, quick.num_folds) == (128, 3, 2, 5)
    assert (official.rate, quick.rate, official.max_epoch) == (1e-3, 1e-2, 200)
    snli = official.for_snli()
    assert (snli.decays, snli.max_epoch, snli.epoch_size) == ((1e-9,), 15, 1)
    assert ClassifierConfig(num_hidden=50).for_word_content().num_hidden == 0
