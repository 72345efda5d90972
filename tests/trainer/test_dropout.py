"""Keyed dropout: its share, no pattern, the same for the same token; rates of spans in every layout."""

import dataclasses

import numpy as np
import pytest
import torch
from families import PACKED as SHARED
from messages import all_of
from scipy.stats import chi2
from tiny import random_spans, tiny_encoder

from declutr.trainer.data.packedbatch import TokenRates, TokenTable, drops, limit, signed
from declutr.trainer.model.dropout import DropoutKeys, KeyedDropout, key_dropout, words

TOKENS, FEATURES = 4096, 256


def random_keys(count, seed=0):
    return torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def masks(p, layer=3):
    keys = TokenTable.of(torch.full((TOKENS // 64,), 64), random_keys(TOKENS // 64), None).keys
    return drops(keys[:, None] + words(layer, FEATURES, torch.device("cpu")), limit(p))


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
    def mixed(word):
        word ^= signed(word) >> 16 & 0xFFFFFFFF  # the sign is shifted in
        word = word * 0x7FEB352D & 0xFFFFFFFF
        word ^= signed(word) >> 15 & 0xFFFFFFFF
        return signed(word * 0x846CA68B & 0xFFFFFFFF)

    numbers = [*np.random.default_rng(0).integers(0, 2**32, 200).tolist(), 1, 2**16, 2**31]
    dropped = drops(torch.tensor([signed(word) for word in numbers], dtype=torch.int32), limit(0.3))
    assert dropped.tolist() == [mixed(word) < limit(0.3) for word in numbers]


def test_every_dropout_layer_is_replaced_once_and_a_token_keeps_its_mask_in_any_company():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.2))
    model, keys, tokens = torch.nn.Sequential(torch.nn.Dropout(0.4), inner), DropoutKeys(), random_keys(7, seed=1)
    key_dropout(model, keys, FEATURES)
    layers = [module for module in model.modules() if isinstance(module, KeyedDropout)]
    assert [(layer.p, layer.layer) for layer in layers] == [(0.4, 0), (0.2, 1)]
    assert not any(isinstance(module, torch.nn.Dropout) for module in model.modules())
    layer, hidden, keys.tokens = layers[0].train(), torch.ones(7, FEATURES), tokens
    together = layer(hidden)
    keys.tokens = tokens[3:5]
    assert torch.equal(together[3:5], layer(hidden[3:5]))
    assert set(together.unique().tolist()) == {0.0, np.float32(1 / 0.6).item()}


def test_without_keys_it_refuses_and_in_evaluation_it_is_silent():
    layer, hidden = KeyedDropout(0.4, 0, DropoutKeys(), 3), torch.ones(2, 3)
    assert layer.eval()(hidden) is hidden
    with pytest.raises(RuntimeError, match=all_of("SpanBatch.keys", "missing")):
        layer.train()(hidden)
    # values of no span are kept in any batch; their number may be that of its tokens or spans
    layer.keys, distances = DropoutKeys(), torch.ones(8, 3)
    for shape in ((1, 8), (8, 5), (2, 4)):
        layer.keys.tokens = torch.ones(shape, dtype=torch.int32)
        assert layer(distances) is distances


LENGTHS = [5, 9, 3, 9, 7, 12]
FAMILIES = ("roberta", "bert", "modernbert")


def spans(rates=None):
    keys = torch.arange(1, len(LENGTHS) + 1, dtype=torch.int32) * 77777
    table = None if rates is None else torch.tensor(rates, dtype=torch.float64).expand(len(LENGTHS), 2)
    return dataclasses.replace(random_spans(LENGTHS), keys=keys, rates=table)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rates_of_spans_are_those_of_layers(family, layout):
    """An encoder with other rates, given these, computes what an encoder with these rates computes."""
    attention = 0.2 if family == "modernbert" else 0.3  # it drops hidden states with the rate of its attention
    own = tiny_encoder(family, dropout=0.2, attention_dropout=attention, layout=layout)
    other = tiny_encoder(family, dropout=0.5, layout=layout)
    assert torch.equal(own.hidden(spans()), other.hidden(spans((0.2, attention))))
    assert not torch.equal(own.hidden(spans()), other.hidden(spans()))


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_and_microbatches_drop_the_same(family):
    table = [[0.1, 0.3], [0.4, 0.0], [0.0, 0.2], [0.05, 0.15], [0.2, 0.2], [0.0, 0.0]]
    for rates in (None, table):
        settings = {"dropout": 0.2, "attention_dropout": 0.3}
        packed, padded = (tiny_encoder(family, layout=layout, **settings) for layout in ("packed", "padded"))
        batch = spans(rates)
        together = packed.hidden(batch)
        torch.testing.assert_close(padded.hidden(batch), together, atol=1e-12, rtol=1e-12)
        for encoder in (packed, padded):
            pieces = [encoder.hidden(piece) for piece in batch.slices([(0, 1), (1, 4), (4, 6)])]
            torch.testing.assert_close(torch.cat(pieces), together, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_rate_of_zero_drops_nothing_and_evaluation_ignores_rates(layout):
    encoder = tiny_encoder(dropout=0.3, attention_dropout=0.3, layout=layout)
    nothing = encoder.hidden(spans((0.0, 0.0)))
    encoder.eval()
    assert torch.equal(nothing, encoder.hidden(spans()))
    assert torch.equal(nothing, encoder.hidden(spans((0.5, 0.5))))


def test_heads_that_share_keys_drop_in_the_padded_layout():
    """EuroBERT with two query heads for one key head; at a rate of almost 0 it is the encoder without dropout."""
    shape = {**SHARED["eurobert"], "model_type": "eurobert", "num_key_value_heads": 1}
    encoders = (tiny_encoder(attention_dropout=rate, from_config=shape, layout="padded") for rate in (1e-9, 0.0))
    torch.testing.assert_close(*(encoder.hidden(spans()) for encoder in encoders), atol=1e-5, rtol=1e-5)  # rotary


def layer_with(rates, lengths, keys, features):
    table, lengths = DropoutKeys(), torch.tensor(lengths)
    table.tokens = TokenTable.of(lengths, keys, None).keys
    table.hidden = TokenRates.of(torch.tensor(rates, dtype=torch.float64), lengths)
    return KeyedDropout(0.0, 3, table, features).train()


def test_dropout_of_two_views_has_its_shares_is_independent_and_keeps_the_mean_in_half_precision():
    rates, features, length = (0.05, 0.155), 128, 64
    for pair, expected in (([0.0, 0.3], True), ([0.0, 0.0], False)):
        assert TokenRates.of(torch.tensor(pair, dtype=torch.float64), torch.tensor([1, 2])).any == expected
    layer = layer_with(rates * 32, [length] * 64, random_keys(64), features)
    dropped = (layer(torch.ones(64 * length, features)) == 0).view(32, 2, length, features).numpy()
    first, second = dropped[:, 0].ravel(), dropped[:, 1].ravel()
    size = first.size
    for view, rate in ((first, rates[0]), (second, rates[1])):
        assert abs(view.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / size)
    counts = np.array([[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), 0]])
    counts[1, 1] = size - counts.sum()
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / size
    assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(0.999, 1)
    # The factor 1 / (1 - p) is applied in float32: bfloat16 has no number near 1 / 0.85.
    layer, value = layer_with([0.15], [3], random_keys(1), 4), torch.full((3, 4), 0.85, dtype=torch.bfloat16)
    assert layer(value).unique().tolist()[-1] == pytest.approx(value[0, 0].item() / 0.85, rel=2**-8)
