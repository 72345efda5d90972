"""Layers of an objective behind the pooling of an exported encoder."""

import numpy as np
import pytest
import torch
from madeup import config_of, shards
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers import AutoTokenizer

from declutr.encoders.loading import load_encoder
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Dense, Normalize, steps_of, write_steps
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.setup.build import build_encoder
from declutr.trainer.setup.tasks import build_task, used_parameters
from declutr.trainer.step.microbatch import Microbatch

TEXTS = ["some words", "others", "some words and others"]


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Identity()], ids=["tanh", "identity"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_dense_layers_are_loaded_by_every_library(tmp_path, activation, bias):
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


@pytest.mark.parametrize("layers", [0, 1])
def test_an_encoder_with_layers_is_a_start_that_embeds_as_before(tmp_path, layers):
    """Training, held-out scores and export use the layers; without layers, a normalisation changes nothing."""
    torch.manual_seed(3)
    data = shards(tmp_path / "data")
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    config = config_of(data, "unused")
    scratch = build_encoder(config, tokenizer)
    folder = tmp_path / "start"
    folder.mkdir()
    write_encoder(scratch, tokenizer, folder)
    dense = [Dense(nn.Linear(scratch.hidden_size, 5), nn.Tanh())] * layers
    write_steps(folder, [Normalize(), *dense, Normalize()])
    pretrained = config.encoder.model_copy(update={"pretrained": str(folder), "from_config": None})
    config = config.model_copy(update={"encoder": pretrained})
    encoder = build_encoder(config, tokenizer).eval()
    assert encoder.output_size == encoder.embedding_size == (5 if layers else scratch.hidden_size)
    assert len(encoder.behind) == 2 * layers
    before = load_encoder(str(folder)).encode(TEXTS)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    nothing = torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(
        torch.tensor([one for row in ids for one in row]), torch.tensor([len(row) for row in ids]), nothing, nothing
    )
    with torch.no_grad():
        own = nn.functional.normalize(encoder.embed(batch), dim=-1).numpy()
        trained, _ = encoder(batch)
    assert np.abs(own - before).max() < 1e-5
    assert trained.shape == (3, encoder.output_size)
    assert used_parameters(
        encoder, [build_task(config, "", encoder, load_manifest(data), Communicator(), Microbatch())]
    ) >= {id(parameter) for parameter in encoder.behind.parameters()}
    again = tmp_path / "again"
    again.mkdir()
    write_encoder(encoder, tokenizer, again)
    write_steps(again, steps_of(encoder.behind))
    after = load_encoder(str(again)).encode(TEXTS)
    assert np.abs(after / np.linalg.norm(after, axis=1, keepdims=True) - before).max() < 1e-5
