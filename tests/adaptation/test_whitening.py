"""The closed form: its matrix against a plain writing, and the encoder that it makes."""

import json

import numpy as np
import pytest
import torch
from madeup import config_of, shards
from messages import all_of
from sentence_transformers import SentenceTransformer
from tiny import VOCABULARY, documents
from torch import nn
from transformers import AutoTokenizer

from declutr.adaptation.candidates import WithinSums, passage_ids, whitening, within_sums, write_whitened
from declutr.common.errors import UsageError
from declutr.encoders.loading import load_encoder
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_encoder
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.model.behind import Dense, Normalize, write_steps
from declutr.trainer.model.language_model import vocabulary_of

TEXTS = ["some words", "others", "some words and others"]


def drawn(counts, size=6, seed=0):
    """Embeddings of documents with these numbers of spans, around a point of each document."""
    rng, owners = np.random.default_rng(seed), np.repeat(np.arange(len(counts)), counts)
    return rng.normal(size=(len(counts), size))[owners] + rng.normal(size=(len(owners), size)), owners


def plain(embeddings, owners, power, shrinkage):
    """The definition, document by document."""
    unit = [row / np.sqrt(row @ row) for row in embeddings]
    size, scatter, degrees = len(unit[0]), 0, 0
    for document in set(owners.tolist()):
        rows = [row for row, owner in zip(unit, owners, strict=True) if owner == document]
        center = sum(rows) / len(rows)
        scatter = scatter + sum(np.outer(row - center, row - center) for row in rows)
        degrees += len(rows) - 1
    covariance = scatter / degrees
    covariance = (covariance / (np.trace(covariance) / size) + shrinkage * np.eye(size)) / (1 + shrinkage)
    values, vectors = np.linalg.eigh(covariance)
    return vectors @ np.diag(values**-power) @ vectors.T


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(("power", "shrinkage"), [(0.25, 0.1), (0.5, 0.001), (1.0, 10.0)])
def test_whitening_of_any_number_of_blocks_equals_a_plain_writing(blocks, power, shrinkage, monkeypatch):
    monkeypatch.setattr("declutr.adaptation.candidates.POWER", power)
    monkeypatch.setattr("declutr.adaptation.candidates.SHRINKAGE", shrinkage)
    counts = [4, 2, 1, 3, 4, 4, 2, 5, 1, 4]
    embeddings, owners = drawn(counts)
    blocks = [np.isin(owners, part) for part in np.array_split(np.arange(len(counts)), blocks)]
    first, *others = [WithinSums.of(embeddings[block], owners[block]) for block in blocks]
    assert np.abs(whitening(sum(others, first)) - plain(embeddings, owners, power, shrinkage)).max() < 1e-10


def test_whitening_from_fewer_documents_than_dimensions_is_finite():
    matrix = whitening(WithinSums.of(*drawn([2, 2], size=64)))
    assert np.isfinite(matrix).all()
    assert np.linalg.eigvalsh(matrix).min() > 0


@pytest.mark.parametrize(
    ("embeddings", "owners", "words"),
    [
        (*drawn([1] * 5), ("5 documents", "one span", "two spans")),
        (np.repeat(drawn([1] * 3)[0], 4, axis=0), np.repeat(np.arange(3), 4), ("12 spans", "3 documents")),
    ],
    ids=["one span a document", "repeated text"],
)
def test_whitening_of_documents_without_spread_is_refused(embeddings, owners, words):
    with pytest.raises(UsageError, match=all_of(*words)):
        whitening(WithinSums.of(embeddings, owners))


def test_passages_are_spread_over_the_document_and_do_not_overlap():
    table = documents([24, 100, 47], 12)
    rows, owners = passage_ids(table, 10, VOCABULARY)
    assert owners.tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
    tokens = table["tokens"].to_pylist()
    for row, owner, start in zip(rows, owners, [0, 12, 0, 24, 60, 84, 0, 12, 24], strict=True):
        assert row == [VOCABULARY.bos, *tokens[owner][start : start + 10], VOCABULARY.eos]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A folder of shards, and an encoder with a dense layer of its own made for them."""
    root = tmp_path_factory.mktemp("start")
    data, folder = shards(root / "data"), root / "encoder"
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    encoder = build_encoder(config_of(data, "unused"), tokenizer).eval()
    folder.mkdir()
    write_encoder(encoder, tokenizer, folder)
    torch.manual_seed(1)
    write_steps(folder, [Normalize(), Dense(nn.Linear(encoder.hidden_size, 5), nn.Tanh()), Normalize(), Normalize()])
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits | {"max_seq_length": 8}))
    return folder, data


def test_whitened_encoder_is_loaded_alike_by_everyone(start, tmp_path):
    encoder, sums = load_encoder(str(start[0])), WithinSums.of(*drawn([3] * 9, size=5))
    (tmp_path / "white").mkdir()
    write_whitened(encoder, sums, tmp_path / "white")
    expected = encoder.encode(TEXTS).astype(np.float64) @ whitening(sums)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    ours = load_encoder(str(tmp_path / "white"))
    theirs = SentenceTransformer(str(tmp_path / "white"), device="cpu")
    assert (ours.max_tokens, theirs.max_seq_length) == (8, 8)
    for loaded in (ours, theirs):
        assert np.abs(loaded.encode(TEXTS) - expected).max() < 1e-5
    kinds = "Transformer Pooling Normalize Dense Normalize Dense Normalize"
    assert " ".join(type(module).__name__ for module in theirs) == kinds


def test_sums_are_those_of_every_training_document_once(start, monkeypatch):
    folder, data = start
    monkeypatch.setattr("declutr.adaptation.candidates._BLOCK_DOCUMENTS", 20)
    encoder = load_encoder(str(folder))
    sums = within_sums(encoder, data)
    table = ShardSet(data, "train").take(np.arange(57))  # all of them, in one block
    vocabulary = vocabulary_of(encoder.tokenizer)
    rows, owners = passage_ids(table, encoder.max_tokens - vocabulary.num_specials, vocabulary)
    assert (sums.documents, sums.spans) == (57, len(rows))
    assert np.abs(sums.scatter - WithinSums.of(encoder.embed_ids(rows), owners).scatter).max() < 1e-9
