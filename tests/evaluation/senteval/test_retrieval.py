"""Retrieval: the official draws, its loss written with a projection for every contrast, and what it is there for."""

import numpy as np
import pytest
import torch
from messages import all_of

from declutr.evaluation.senteval import retrieval as settings
from declutr.evaluation.senteval.features import orders
from declutr.evaluation.senteval.network import linear_start
from declutr.evaluation.senteval.retrieval import Gallery, contrasts, mean_recalls, recalls, retrieval

pytestmark = pytest.mark.usefixtures("one_thread")
SEED = 1111


@pytest.fixture
def small(monkeypatch):
    """Settings for galleries of a few images."""
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
    last = mean_recalls(test, official_training(train, tenacity + 2))
    assert last != once, "later passes change the recalls"


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
