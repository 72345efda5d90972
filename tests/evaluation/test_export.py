"""Exports load without this project, give the embeddings of the encoder, and carry their measurement."""

import gzip
import json
import os
import sys

import numpy as np
import pytest
import torch
from encoderfiles import BERT, keys
from folders import TEXTS, encoder_folder
from messages import says
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from declutr.cli.main import main
from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file
from declutr.encoders.exported import SETTINGS
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import unit_rows
from declutr.evaluation.export.inputs import ExportConfig, read_inputs
from declutr.evaluation.export.job import MEASUREMENT, write_static

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
pytest.importorskip("onnxscript", reason="pip install -e '.[onnx]'")
WORDS = [f"word{chr(97 + first)}{chr(97 + second)}" for first in range(26) for second in range(8)]
LINES = [" ".join(WORDS[place : place + 20]) for place in range(180)]
STSB = "\n".join(f"a\tb\tc\td\t{number % 6}\ttext {number}\tword text {number % 5}" for number in range(12))


def export(folder, output, kind, *more):
    return main(["export", str(folder), "--to", kind, "--output", str(output), *map(str, more)])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "pooling", "after"), [
    ("roberta", "mean", []), ("roberta", "mean_without_cls", []), ("bert", "max", ["Dense", "Normalize"]),
    ("modernbert", "mean", []),  # its rotary embeddings need the older opset
])  # fmt: skip
def test_onnx_embeddings_equal_those_of_torch(tmp_path, family, pooling, after):
    folder, output = encoder_folder(tmp_path / "encoder", family, pooling, after), tmp_path / "onnx"
    assert export(folder, output, "onnx") == 0
    tokenizer = Tokenizer.from_file(str(output / "tokenizer.json"))
    session = onnxruntime.InferenceSession(output / "model.onnx", providers=["CPUExecutionProvider"])
    expected = load_encoder(str(folder), device="cpu").encode(TEXTS)
    for size in (1, 7, len(TEXTS)):
        rows = tokenizer.encode_batch(TEXTS[:size])
        inputs = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
        inputs = {name: np.array(value, np.int64) for name, value in inputs.items()}
        (found,) = session.run(["sentence_embedding"], inputs)
        np.testing.assert_allclose(found, expected[:size], atol=1e-4, rtol=0)
    np.testing.assert_allclose(load_encoder(str(output)).encode(TEXTS), expected, atol=1e-4, rtol=0)
    tokenizer.no_truncation()
    tokenizer.save(str(output / "tokenizer.json"))
    with pytest.raises(EncoderError, match=r"tokenizer.json"):
        load_encoder(str(output))
    tokenizer.add_tokens(["beyond"])
    tokenizer.save(str(output / "tokenizer.json"))
    keys(SETTINGS, tokenizer=hash_file(output / "tokenizer.json"))(output)
    with pytest.raises(EncoderError, match="onnxruntime cannot compute it"):  # at once, before such a text comes
        load_encoder(str(output))


@pytest.mark.slow
def test_integers_are_near_whatever_is_beside_a_text(tmp_path):
    folder, output = encoder_folder(tmp_path / "encoder", "bert", "mean", ["Normalize"]), tmp_path / "int8"
    (tmp_path / "sts-test.csv").write_text(STSB)
    (tmp_path / "corpus.txt").write_text("\n".join(text.strip() for text in TEXTS if text.strip()))
    assert export(folder, output, "onnx-int8", "--stsb", tmp_path, "--corpus", tmp_path / "corpus.txt") == 0
    encoder = load_encoder(str(output))
    found, expected = encoder.encode(TEXTS), load_encoder(str(folder), device="cpu").encode(TEXTS)
    assert (unit_rows(found) * unit_rows(expected)).sum(axis=1).min() > 0.99
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, found, atol=1e-5, rtol=0)
    figures = json.loads((output / MEASUREMENT).read_text())
    assert figures["bytes"] == (output / "model.onnx").stat().st_size
    assert figures["cosine"] > 0.99
    assert abs(figures["stsb_after"] - figures["stsb_before"]) < 10
    assert figures["compared_with"] in ("torch", "onnx")
    assert figures["versions"]["onnxruntime"] == onnxruntime.__version__
    assert f"{figures['stsb_after']:.2f}" in (output / "README.md").read_text()


@pytest.mark.slow
def test_integers_are_measured_on_texts_of_the_corpus_that_set_no_range(tmp_path, capsys):
    """Without a corpus the general sentences do both, which is said."""
    folder = encoder_folder(tmp_path / "encoder", "bert", "mean")
    texts = [f"text {number} of the corpus" for number in range(30)]
    (tmp_path / "corpus.txt").write_text("\n".join([*texts, texts[0], texts[0]]))
    assert export(folder, tmp_path / "half", "onnx-int8", "--corpus", tmp_path / "corpus.txt") == 0
    half = json.loads((tmp_path / "half" / MEASUREMENT).read_text())
    assert (half["texts"], half["texts_of_ranges"]) == (15, 0)
    assert "ranges" not in capsys.readouterr().out
    assert export(folder, tmp_path / "same", "onnx-int8") == 0
    same = json.loads((tmp_path / "same" / MEASUREMENT).read_text())
    assert same["texts"] == same["texts_of_ranges"] == 60
    says(capsys.readouterr().out, "60 of 60 texts", "ranges")
    says((tmp_path / "same" / "README.md").read_text().splitlines(), "60 texts", "60 of them", "ranges")


@pytest.mark.slow
def test_table_has_the_numbers_of_sentence_transformers_and_records_that_cannot_be_read_are_counted(tmp_path, capsys):
    lines = [json.dumps({"body": line}) for line in LINES]
    (tmp_path / "corpus.jsonl").write_text("\n".join([lines[0], "no json", '{"body": 3}', *lines[1:]]))
    more = ["--corpus", tmp_path / "corpus.jsonl", "--vocabulary-size", 150, "--dimensions", 8]
    folder, output = encoder_folder(tmp_path / "encoder"), tmp_path / "static"
    assert export(folder, output, "static", *more) == 1
    says(capsys.readouterr().err, "--corpus", "--text-field", "body")
    more += ["--text-field", "body"]
    assert export(folder, output, "static", *more) == 0
    says(capsys.readouterr().out.splitlines(), "skipped", "1 invalid_json")
    figures = json.loads((output / MEASUREMENT).read_text())
    assert figures["corpus"] == {"read": 180, "skipped": {"invalid_json": 1, "no_text_field": 1}, "cut": False}
    assert figures["cosine"] is None
    texts = ["", "wordaa wordbb", "€ unknown ✓", "wordaa " * 1000, "\n\t"]
    encoder = load_encoder(str(output))
    theirs = SentenceTransformer(str(output), device="cpu").encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), theirs, atol=1e-6, rtol=0)
    assert theirs.shape == (5, 8)
    with pytest.raises(TypeError, match="a list of texts"):
        encoder.encode("wordaa")
    with pytest.raises(TypeError, match=r'encode\(list\(table\["text"\]\)\)'):  # else its keys, silently
        encoder.encode({"text": "wordaa"})
    growing = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    keys("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [growing] * 3})(output)
    with pytest.raises(EncoderError, match="more than 256 times as long"):
        load_encoder(str(output))
    first = (output / "model.safetensors").read_bytes()
    assert export(folder, tmp_path / "again", "static", *more) == 0
    assert (tmp_path / "again/model.safetensors").read_bytes() == first
    (tmp_path / "bad.jsonl").write_text('{"body": 3}\n{"body": 4}\n')
    bad = ["--corpus", tmp_path / "bad.jsonl", "--text-field", "body"]
    assert export(folder, tmp_path / "out", "static", *bad) == 1
    says(capsys.readouterr().err, "--corpus", "no text", "2 records", "bad.jsonl")


@pytest.mark.parametrize("size", [8, 32])
def test_table_of_an_uncased_encoder_is_uncased_also_if_it_cuts_its_embeddings(tmp_path, size):
    folder = encoder_folder(tmp_path / "encoder", truncate_dim=size)
    keys(BERT, do_lower_case=True)(folder)
    write_static(load_encoder(str(folder)), [" ".join(map(str.capitalize, WORDS))] * 2, tmp_path, 200, 8)
    assert "W" not in Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()


def test_damaged_graph_is_named(tmp_path):
    whole = {"model.onnx": "{}", "tokenizer.json": "{}", "declutr_onnx.json": json.dumps({"size": 4, "prompt": ""})}
    for damage in whole:
        for name, content in (whole | {damage: "{"}).items():
            (tmp_path / name).write_text(content)
        with pytest.raises(EncoderError, match=str(tmp_path)):
            load_encoder(str(tmp_path))
    for setting in ({"max_tokens": 8}, {"pooling": "cls"}):  # which an export has fixed
        with pytest.raises(EncoderError, match="export again"):
            load_encoder(str(tmp_path), **setting)


def test_problems_are_told_at_once_and_nothing_is_written(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    pairs = tmp_path / "p"
    assert export(tmp_path / "none", out, "static", "--stsb", tmp_path, "--pairs", pairs) == 1
    message = capsys.readouterr().err
    for path in (tmp_path / "none", pairs):  # paths first, before libraries load
        says(message, path, "no such file or folder")
    pairs.write_text("")
    assert export("hashed-words:8", out, "static", "--stsb", tmp_path, "--pairs", pairs) == 1
    message = capsys.readouterr().err
    for parts in (("--output", out, "exists"), ("--to static", "--corpus"), ("--stsb", "sts-test.csv"), (pairs,)):
        says(message, *parts)
    assert not list(out.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_folder_that_is_read_only_is_named(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert export("hashed-words:8", tmp_path / "out", "onnx") == 1
    says(capsys.readouterr().err, "--output", "nothing can be written")


def test_only_transformers_become_graphs_and_it_says_what_packages_to_install(tmp_path, monkeypatch, capsys):
    from declutr.evaluation.export.graph import OPSETS, write_graph

    assert export("hashed-words:8", tmp_path / "out", "onnx") == 1
    says(capsys.readouterr().err, "only transformers")
    assert not list(tmp_path.iterdir())
    for package in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)  # importing it raises ImportError
            assert export("hashed-words:8", tmp_path / "out", "onnx-int8") == 1
        says(capsys.readouterr().err, package, "pip install")

    class Odd(torch.nn.Module):
        """A layer whose work depends on the numbers themselves, which no graph can hold."""

        def forward(self, rows):
            return rows * sum(1 for value in rows.flatten().tolist() if value > 0)

    encoder = load_encoder(str(encoder_folder(tmp_path / "encoder")), device="cpu")
    encoder.after.append(Odd())
    with pytest.raises(EncoderError, match="exporter"):
        write_graph(encoder, tmp_path, OPSETS[0])


def test_a_corpus_of_one_compressed_file_is_cut_within_it(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt.gz").write_bytes(gzip.compress(b"a text of ten words and more, which is repeated\n" * 50))
    settings = {"model": "hashed-words:8", "to": "static", "output": tmp_path / "out"}
    config = ExportConfig(corpus=[str(tmp_path / "corpus.txt.gz")], **settings)
    assert read_inputs(config).corpus_facts == {"read": 50, "skipped": {}, "cut": False}
    monkeypatch.setattr("declutr.evaluation.export.inputs._CORPUS_CHARACTERS", 100)
    assert read_inputs(config).corpus_facts == {"read": 3, "skipped": {}, "cut": True}
