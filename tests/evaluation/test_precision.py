"""Precision and speed-ups of an encoder: bf16 and packed linear layers change its vectors by a known little."""

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.embed import documentation, paragraphs_of, sentences_of, write_encoder
from declutr.encoders.loading import load_encoder, pack_linears
from declutr.encoders.protocol import vectors_fingerprint


@pytest.fixture(scope="module")
def texts():
    sentences = sentences_of(documentation(), 60)
    return ["", *sentences[:40], *paragraphs_of(sentences, 3)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("encoder")
    write_encoder(path, "tiny", texts, 600, seed=0)
    return str(path)


def test_bf16_has_a_cosine_of_at_least_0_999_and_is_told_apart(folder, texts):
    full, half = (load_encoder(folder, device="cpu", precision=precision) for precision in ("fp32", "bf16"))
    a, b = full.encode(texts), half.encode(texts)
    assert b.dtype == np.float32
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert 0.999 <= cosines.min() < cosines.max() <= 1.0001
    assert not np.array_equal(a, b)
    assert full.fingerprint == half.fingerprint, "an index of a GPU can be searched on a CPU"
    assert vectors_fingerprint(full) == full.fingerprint != vectors_fingerprint(half)
    assert load_encoder(folder, device="cpu").precision == "fp32"


@pytest.mark.parametrize("size", [1, 7, 44, 1000])
def test_tokenizing_ahead_changes_nothing_but_the_batches(folder, texts, size):
    encoder = load_encoder(folder, device="cpu")
    whole = encoder.encode(texts)
    object.__setattr__(encoder, "chunk_texts", size)
    assert np.abs(encoder.encode(texts) - whole).max() < 1e-5
    assert encoder.encode([]).shape == (0, 32)


def test_an_error_of_tokenizing_ahead_reaches_the_caller(folder, texts):
    encoder = load_encoder(folder, device="cpu")
    object.__setattr__(encoder, "chunk_texts", 10)
    with pytest.raises(TypeError):
        encoder.encode([*texts[:15], 7, *texts[15:]])


def test_packed_linear_layers_serve_inference_alone():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 8, bias=False))
    inputs, names = torch.randn(2, 30, 48), list(module.state_dict())
    before = module(inputs)
    pack_linears(module)
    assert torch.equal(module(inputs), before)
    module(inputs).sum().backward()
    assert module[0].weight.grad is not None
    with torch.inference_mode():
        assert torch.allclose(module(inputs), before, atol=1e-6)
        assert module(inputs[:, :0]).shape == (2, 0, 8)
        assert torch.equal(module.double()(inputs.double()), module(inputs.double()))
    assert list(module.state_dict()) == names
