"""Fits of SentEval's classifier and of retrieval, as alone, of scikit-learn or released; tests/golden has more."""

import itertools

import numpy as np
import pytest
import torch
from messages import all_of
from sklearn.model_selection import StratifiedKFold
from torch import nn

from declutr.common.storage import hash_json
from declutr.evaluation.senteval import retrieval as settings
from declutr.evaluation.senteval.classifier import examples, fit_many
from declutr.evaluation.senteval.features import BlockBuffer, TrainingSet, hold_out, orders, stratified_folds, table
from declutr.evaluation.senteval.network import ClassifierConfig, linear_start
from declutr.evaluation.senteval.protocols import Pairs, relatedness
from declutr.evaluation.senteval.retrieval import Gallery, contrasts, mean_recalls, recalls, retrieval

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIGS = {
    "adam": ClassifierConfig(max_epoch=7, batch_size=16, tenacity=0, learning_rate=0.1, epoch_size=1),
    "rmsprop": ClassifierConfig(optimizer="rmsprop", max_epoch=12, epoch_size=2, tenacity=0, batch_size=16),
}
DECAYS = (1e-5, 1e-2, 0.1)


@pytest.fixture(scope="module")
def data():
    stream = np.random.RandomState(0)
    labels = stream.randint(0, 3, 130)
    means = stream.randn(3, 12)
    return (means[labels] + 2.5 * stream.randn(130, 12)).astype(np.float32), labels


def some_sets(num_sets, seed):
    """Sets of unlike sizes: passes of three and of four batches, full and nearly empty last ones, shared streams."""
    stream, sizes = np.random.RandomState(seed), itertools.cycle((47, 48, 49, 47, 64, 33))
    draws = ((stream.permutation(130), size) for size in itertools.islice(sizes, num_sets))
    return [TrainingSet(rows[:size], rows[size : size + 20 + size % 3]) for rows, size in draws]


def fit_alone(config, decay, features, labels, one):
    """The released loop: a module with its optimizer, from the global generators; best accuracy, parameters, passes."""
    x, y, stream = torch.from_numpy(features), torch.from_numpy(labels).long(), np.random.RandomState(config.seed)
    best, misses, passes = -1.0, 0, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = nn.Linear(x.shape[1], 3)
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.RMSprop
        optimizer = kind(model.parameters(), lr=config.rate, weight_decay=decay)
        while passes <= config.max_epoch and misses <= config.tenacity:
            for _ in range(config.epoch_size):
                for part in torch.from_numpy(one.train[stream.permutation(len(one.train))]).split(config.batch_size):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                    optimizer.step()
            passes += config.epoch_size
            right = (model(x[one.dev]).argmax(1) == y[one.dev]).sum().item() / len(one.dev)
            if right > best:
                best, state = right, [p.detach().clone() for p in model.parameters()]
            else:
                misses += 1
    return best, state, passes


@pytest.mark.parametrize("name", CONFIGS)
def test_every_fit_is_the_fit_alone(data, name):
    features, labels = data
    config, sets = CONFIGS[name], some_sets(6, 1)
    rows = examples(table(features), labels)
    fits = fit_many(rows, rows, sets, DECAYS, config, 3)
    lengths = set()
    for (place, chosen), (number, decay) in itertools.product(enumerate(sets), enumerate(DECAYS)):
        accuracy, state, passes = fit_alone(config, decay, features, labels, chosen)
        assert fits.accuracies[place, number] == accuracy
        for ours, theirs in zip(fits.network.parameters, state, strict=True):
            torch.testing.assert_close(ours[place, number], theirs, rtol=1e-3, atol=1e-5)
        answers = fits.predict(place, number, rows.features)
        assert (answers[chosen.dev] == labels[chosen.dev]).mean() == pytest.approx(accuracy)
        lengths.add(passes)
    assert len(lengths) > 1, "fits that end at one time do not show that the others go on unharmed"


@pytest.mark.parametrize("keep_both", [False, True])
def test_features_of_pairs_are_difference_and_product_and_of_snli_both_sides_too(keep_both):
    first, second = np.random.RandomState(0).randn(2, 9, 4).astype(np.float32)
    parts = [np.abs(first - second), first * second]
    expected = np.concatenate([first, second, *reversed(parts)] if keep_both else parts, axis=1)
    pairs, rows = table(first, second, keep_both), torch.tensor([[3, 0, 8]])
    assert pairs.width == expected.shape[1]
    np.testing.assert_array_equal(BlockBuffer(pairs, 1, 3).take(rows)[0], expected[rows[0]])


def test_sets_that_do_not_fit_in_memory_together_are_the_same(data):
    """1,500 wide rows: eleven sets of a batch of 64 make two blocks."""
    rows = examples(table(np.tile(data[0], 125)), data[1])
    sets = [TrainingSet(chosen.train[:33], chosen.dev) for chosen in some_sets(13, 2)]
    config = ClassifierConfig(max_epoch=2, epoch_size=2)
    together = fit_many(rows, rows, sets, DECAYS[:1], config, 3)
    for place, chosen in enumerate(sets):
        alone = fit_many(rows, rows, [chosen], DECAYS[:1], config, 3)
        np.testing.assert_array_equal(together.accuracies[place], alone.accuracies[0])
        for ours, theirs in zip(together.network.parameters, alone.network.parameters, strict=True):
            torch.testing.assert_close(ours[place], theirs[0], rtol=1e-4, atol=1e-6)


def test_each_set_may_have_a_decay_of_its_own_and_global_generators_are_neither_read_nor_moved(data):
    rows = examples(table(data[0]), data[1])
    before = torch.get_rng_state().clone(), np.random.get_state()[1].copy()  # noqa: NPY002
    sets, config = some_sets(3, 3), CONFIGS["adam"]
    all_decays = fit_many(rows, rows, sets, DECAYS, config, 3)
    own = fit_many(rows, rows, sets, [[DECAYS[2]], [DECAYS[0]], [DECAYS[1]]], config, 3)
    for place, number in enumerate((2, 0, 1)):
        assert own.accuracies[place, 0] == all_decays.accuracies[place, number]
        torch.testing.assert_close(own.network.parameters[0][place, 0], all_decays.network.parameters[0][place, number])
    stratified_folds([0, 1] * 10, 2)
    hold_out(np.arange(40), 1)
    next(orders(1, 0, 9))
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002


def test_presets_are_the_published_ones():
    official, quick = ClassifierConfig(), ClassifierConfig.prototyping()
    assert (official.batch_size, official.tenacity, official.epoch_size, official.num_folds) == (64, 5, 4, 10)
    assert (quick.batch_size, quick.tenacity, quick.epoch_size, quick.num_folds) == (128, 3, 2, 5)
    assert (official.rate, quick.rate, official.max_epoch) == (1e-3, 1e-2, 200)
    snli = official.for_snli()
    assert (snli.decays, snli.max_epoch, snli.epoch_size) == ((1e-9,), 15, 1)
    assert hash_json(official.identity())[:16] == "91a9bb18f12d99c8", "scores of earlier versions are kept by it"


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
    for our_parts, their_parts in zip(stratified_folds(labels, num_folds, seed), theirs, strict=True):
        for ours, expected in zip(our_parts, their_parts, strict=True):
            np.testing.assert_array_equal(ours, expected)


def test_more_folds_than_rows_of_any_class_and_too_few_rows_to_hold_any_out_are_refused():
    for num_folds in (1, 6):
        with pytest.raises(ValueError, match=all_of(f"num_folds = {num_folds}", "at least 2", "at most 5")):
            stratified_folds([0] * 5 + [1] * 3, num_folds)
    with pytest.raises(ValueError, match=all_of("5%", "at least 20 rows")):
        hold_out(np.arange(19), 1111)
    with pytest.raises(ValueError, match="0 and 1"):
        TrainingSet(np.arange(0), np.arange(1))


def test_held_out_rows_and_orders_are_those_of_the_global_generator():
    official = np.random.RandomState(1111)
    split = official.permutation(53)
    rows = np.arange(100, 153)
    parts = hold_out(rows, 1111)
    np.testing.assert_array_equal(parts.dev, rows[split[:2]])
    np.testing.assert_array_equal(parts.train, rows[split[2:]])
    for _, order in zip(range(3), orders(1111, *parts.stream), strict=False):
        np.testing.assert_array_equal(order, official.permutation(51))


def test_relatedness_of_an_encoder_that_has_collapsed_is_zero():
    same = Pairs(table(np.ones((40, 3)), np.ones((40, 3))), np.linspace(1, 5, 40))
    found, _, num_passes = relatedness(same, same, same)
    assert [found[name] for name in ("devpearson", "pearson", "spearman")] == [0, 0, 0]
    assert num_passes == 250  # the first is the best, four more miss it


SEED = 1111


@pytest.fixture
def small(monkeypatch):
    for name, value in {"SIZE": 12, "BATCH_SIZE": 32, "NUM_CONTRASTS": 6, "FOLD_IMAGES": 20}.items():
        monkeypatch.setattr(settings, name, value)
    return monkeypatch


def made(num_images, seed, noise=0.5):
    """Images and captions that tell of one hidden vector."""
    stream = np.random.RandomState(seed)
    hidden = stream.randn(num_images, 5)
    mixing = np.random.RandomState(99).randn(2, 5, 8)
    captions = np.repeat(hidden, 5, 0) + noise * stream.randn(5 * num_images, 5)
    return Gallery(*(torch.from_numpy(rows.astype(np.float32)) for rows in (hidden @ mixing[0], captions @ mixing[1])))


@pytest.mark.parametrize("begin", [0, 16, 40])
def test_contrasts_are_choices_from_the_captions_of_no_batch(begin, monkeypatch):
    monkeypatch.setattr(settings, "BATCH_SIZE", 16)
    monkeypatch.setattr(settings, "NUM_CONTRASTS", 7)
    permutation = next(orders(3, 0, 45))
    others = [*permutation[:begin], *permutation[begin + 16 :]]
    theirs, ours = np.random.RandomState(5), np.random.RandomState(5)
    size = len(permutation[begin : begin + 16])
    for _ in range(2):
        expected = theirs.choice(others, 7 * size).reshape(size, 7)
        np.testing.assert_array_equal(contrasts(ours, permutation, begin), expected)


def official_training(train, num_passes):
    """The released step, with every pair projected once for every contrast."""
    start, stream = torch.Generator().manual_seed(SEED), np.random.RandomState(SEED)
    batch_size, num_contrasts = settings.BATCH_SIZE, settings.NUM_CONTRASTS
    layers = [torch.nn.Linear(part.shape[1], settings.SIZE) for part in (train.images, train.captions)]
    for layer in layers:
        layer.weight.data, layer.bias.data = linear_start(layer.in_features, settings.SIZE, start)
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()])
    images = train.images.repeat_interleave(5, 0)

    def unit(layer, rows):
        return torch.nn.functional.normalize(layer(rows), dim=-1)

    for _ in range(num_passes):
        permutation = list(stream.permutation(len(images)))
        for i in range(0, len(images), batch_size):
            batch = permutation[i : i + batch_size]
            others = permutation[:i] + permutation[i + batch_size :]
            drawn = [torch.from_numpy(stream.choice(others, num_contrasts * len(batch))) for _ in range(2)]
            pairs = torch.tensor(batch).repeat_interleave(num_contrasts)
            image, caption = unit(layers[0], images[pairs]), unit(layers[1], train.captions[pairs])
            other_image, other_caption = unit(layers[0], images[drawn[0]]), unit(layers[1], train.captions[drawn[1]])
            pair = (image * caption).sum(1)
            loss = (settings.MARGIN - pair + (image * other_caption).sum(1)).clamp(min=0).sum()
            loss += (settings.MARGIN - pair + (caption * other_image).sum(1)).clamp(min=0).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach() for layer in layers for p in layer.parameters()]


def test_training_makes_the_released_steps_and_learns(small):
    small.setattr(settings, "MAX_EPOCH", 2)
    small.setattr(settings, "TENACITY", 5)
    train, dev, test = made(30, 0), made(45, 1), made(45, 2)
    found, dev_total, num_passes = retrieval(train, dev, test, seed=SEED)
    assert num_passes == 3
    totals = [sum(mean_recalls(dev, official_training(train, passes))[:6]) for passes in (0, 1, 2, 3)]
    passes = 1 + int(np.argmax(totals[1:]))
    assert dev_total == pytest.approx(totals[passes], abs=0.5)
    expected = mean_recalls(test, official_training(train, passes))
    to_text = [0, 1, 2, 6]  # recalls of the captions, and their median rank
    assert [found[place] for place in to_text] == pytest.approx([expected[place] for place in to_text], abs=0.5)
    assert dev_total > totals[0] + 5


@pytest.mark.parametrize("tenacity", [0, 1])
def test_training_stops_after_misses_and_the_first_of_equal_bests_is_kept(tenacity, small):
    """A dev set of one image scores 600 whatever is learned: every pass after the first is a miss."""
    small.setattr(settings, "MAX_EPOCH", 6)
    small.setattr(settings, "TENACITY", tenacity)
    train, dev, test = made(30, 0), made(1, 1), made(45, 2)
    found, *rest = retrieval(train, dev, test, seed=SEED)
    assert rest == [600, tenacity + 2]
    small.setattr(settings, "MAX_EPOCH", 0)
    once, _, num_passes = retrieval(train, dev, test, seed=SEED)
    assert (num_passes, found) == (1, once)
    assert mean_recalls(test, official_training(train, tenacity + 2)) != once, "later passes change the recalls"


def test_recalls_are_counted_by_hand_and_equal_embeddings_find_nothing():
    """Image 0's best caption is second, image 1's first; ranks are from 1."""
    captions = torch.tensor([[0.6, 0.8]] * 5 + [[0.0, 1.0]] * 4 + [[0.8, 0.6]])
    assert recalls(torch.eye(2), captions) == (50.0, 100.0, 100.0, 40.0, 100.0, 100.0, 1.0, 2.0)
    images = torch.nn.functional.normalize(torch.randn(1000, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    found = recalls(images, images[:1].expand(5000, -1))
    assert max(found[:3]) <= 0.5
    assert max(found[3:6]) <= 1
    assert found[7] > 400
    with pytest.raises(ValueError, match=all_of("10 training captions", "one batch")):
        retrieval(*[made(2, 0)] * 3)
