"""The ONNX folder, used with onnxruntime and tokenizers alone, gives the encoder's embeddings."""

import json
import sys

import numpy as np
import pytest
from folders import TEXTS, encoder_folder
from messages import says
from tokenizers import Tokenizer

from declutr.cli.main import main
from declutr.evaluation.encoders.loading import load_encoder

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[onnx]'")
pytest.importorskip("onnxscript", reason="pip install -e '.[onnx]'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pooling", "after"),
    [("roberta", "mean", []), ("roberta", "mean_without_cls", []), ("bert", "max", ["Dense", "Normalize"])],
)
def test_onnx_embeddings_equal_those_of_torch(tmp_path, family, pooling, after):
    folder = encoder_folder(tmp_path / "encoder", family, pooling, after)
    assert main(["export-onnx", str(folder), "--output", str(tmp_path / "onnx")]) == 0
    tokenizer = Tokenizer.from_file(str(tmp_path / "onnx/tokenizer.json"))
    session = onnxruntime.InferenceSession(tmp_path / "onnx/model.onnx", providers=["CPUExecutionProvider"])
    expected = load_encoder(str(folder), device="cpu").encode(TEXTS)
    for size in (1, 7, len(TEXTS)):
        rows = tokenizer.encode_batch(TEXTS[:size])
        inputs = {"input_ids": [row.ids for row in rows], "attention_mask": [row.attention_mask for row in rows]}
        (found,) = session.run(
            ["sentence_embedding"], {name: np.array(value, np.int64) for name, value in inputs.items()}
        )
        np.testing.assert_allclose(found, expected[:size], atol=1e-4, rtol=0)
    settings = json.loads((tmp_path / "onnx/declutr_onnx.json").read_text())
    assert settings["size"] == expected.shape[1]
    assert main(["export-onnx", str(folder), "--output", str(tmp_path / "onnx")]) == 1


def test_only_transformers_become_onnx(tmp_path, capsys):
    assert main(["export-onnx", "hashed-words:8", "--output", str(tmp_path / "onnx")]) == 1
    assert "only transformers" in capsys.readouterr().err
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_without_its_packages_it_says_what_to_install(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    assert main(["export-onnx", "nowhere", "--output", str(tmp_path / "onnx")]) == 1
    says(capsys.readouterr().err, package, "pip install")
