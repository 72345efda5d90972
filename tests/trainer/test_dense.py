"""Layers of an objective behind the pooling of an exported encoder."""

import numpy as np
import pytest
import torch
from madeup import config_of, shards
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer

from evaluation.encoders.loading import load_encoder
from trainer.driver.dense import write_steps
from trainer.driver.export import write_encoder
from trainer.model.behind import Dense
from trainer.setup.build import build_encoder

TEXTS = ["some words", "others", "some words and others"]


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()], ids=["tanh", "identity"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_everyone_loads_the_layers(tmp_path, activation, bias):
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(shards(tmp_path / "data") / "tokenizer")
    encoder = build_encoder(config_of(tmp_path / "data", "unused"), tokenizer).eval()
    size = encoder.hidden_size
    folder = tmp_path / "export"
    folder.mkdir()
    write_encoder(encoder, tokenizer, folder)
    loaded = SentenceTransformer(str(folder), device="cpu")
    assert loaded[0].model.pooler is None  # it would be drawn at random and reported as missing
    plain = loaded.encode(TEXTS)
    layers = [Dense(nn.Linear(size, 7, bias=bias), activation), Dense(nn.Linear(7, 5), nn.Tanh())]
    write_steps(folder, layers)
    expected = torch.from_numpy(plain)
    with torch.no_grad():
        for layer in layers:
            expected = layer.activation(layer.linear(expected))
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert theirs.shape == (3, 5)
    assert np.abs(theirs - expected.numpy()).max() < 1e-6
    ours = load_encoder(str(folder)).encode(TEXTS)
    assert np.abs(np.asarray(ours) - theirs).max() < 1e-5
