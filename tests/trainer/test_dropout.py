"""Keyed dropout: the right share, no pattern, the same for the same token."""

import numpy as np
import pytest
import torch
from messages import all_of

from declutr.trainer.data.tokenrates import TokenRates, drops, limit, signed, token_keys
from declutr.trainer.model.dropout import DropoutKeys, KeyedDropout, key_dropout, words

TOKENS, FEATURES = 4096, 256
CPU = torch.device("cpu")


def masks(p, layer=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spans = torch.randint(-(2**31), 2**31, (TOKENS // 64,), generator=generator).to(torch.int32)
    keys = token_keys(spans, torch.full((TOKENS // 64,), 64))
    return drops(keys[:, None] + words(layer, FEATURES, CPU), limit(p))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_has_its_share_and_is_independent(p):
    """Counts by feature and by token are binomial; neighbours, layers and pairs of rows are uncorrelated."""
    dropped = masks(p).double().numpy()
    for axis, size in ((0, TOKENS), (1, FEATURES)):
        z = (dropped.sum(axis=axis) - size * p) / np.sqrt(size * p * (1 - p))
        assert 0.85 < np.sqrt((z**2).mean()) < 1.15
    z = (dropped - p) / np.sqrt(p * (1 - p))
    other = (masks(p, layer=4).double().numpy() - p) / np.sqrt(p * (1 - p))
    for product in (z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[64:] * z[:-64], z * other):
        assert abs(product.mean()) < 5 / np.sqrt(product.size)


def test_an_element_is_dropped_by_the_plain_mix_of_its_word():
    given = [*np.random.default_rng(0).integers(0, 2**32, 200).tolist(), 1, 2**16, 2**31]

    def mixed(word):
        word ^= signed(word) >> 16 & 0xFFFFFFFF  # the sign is shifted in
        word = word * 0x7FEB352D & 0xFFFFFFFF
        word ^= signed(word) >> 15 & 0xFFFFFFFF
        return signed(word * 0x846CA68B & 0xFFFFFFFF)

    found = drops(torch.tensor([signed(word) for word in given], dtype=torch.int32), limit(0.3))
    assert found.tolist() == [mixed(word) < limit(0.3) for word in given]


def test_rates_of_which_some_are_zero_are_rates():
    for rates, expected in (([0.0, 0.3], True), ([0.0, 0.0], False)):
        assert TokenRates.of(torch.tensor(rates, dtype=torch.float64), torch.tensor([1, 2])).any == expected


def test_a_token_keeps_its_mask_in_any_company():
    keys = DropoutKeys()
    tokens = torch.randint(-(2**31), 2**31, (7,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    layer = KeyedDropout(0.4, 0, keys, FEATURES).train()
    hidden = torch.ones(7, FEATURES)
    keys.tokens = tokens
    together = layer(hidden)
    keys.tokens = tokens[3:5]
    apart = layer(hidden[3:5])
    assert torch.equal(together[3:5], apart)
    assert set(together.unique().tolist()) == {0.0, np.float32(1 / 0.6).item()}


def test_without_keys_it_refuses_and_in_evaluation_it_is_silent():
    layer = KeyedDropout(0.4, 0, DropoutKeys(), 3)
    hidden = torch.ones(2, 3)
    assert layer.eval()(hidden) is hidden
    with pytest.raises(RuntimeError, match=all_of("SpanBatch.keys", "missing")):
        layer.train()(hidden)


def test_values_of_no_span_are_kept_in_any_batch():
    """Their number may be that of a batch's tokens or spans."""
    keys = DropoutKeys()
    layer = KeyedDropout(0.4, 0, keys, 3).train()
    distances = torch.ones(8, 3)
    for shape in ((1, 8), (8, 5), (2, 4)):
        keys.tokens = torch.ones(shape, dtype=torch.int32)
        assert layer(distances) is distances


def test_every_dropout_layer_is_replaced_once():
    model = torch.nn.Sequential(
        torch.nn.Dropout(0.1), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.2))
    )
    key_dropout(model, DropoutKeys(), 2)
    found = [module for module in model.modules() if isinstance(module, KeyedDropout)]
    assert [(layer.p, layer.layer) for layer in found] == [(0.1, 0), (0.2, 1)]
    assert not any(isinstance(module, torch.nn.Dropout) for module in model.modules())
