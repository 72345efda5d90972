"""An export as others get it: its card, and nothing of this machine in what `hf upload` sends."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from folders import encoder_folder
from madeup import config_of, save, shards
from messages import says
from sentence_transformers import SentenceTransformer

from declutr.encoders.loading import load_encoder
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.driver.model_card import Card
from declutr.trainer.driver.run import run_training

EXPORTED = {
    *("1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors"),
    *("modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "declutr.json"),
}


@pytest.mark.slow
def test_what_hf_sends_of_an_export_names_no_folder_and_loads(tmp_path):
    """`hf upload` sends all files of the folder, as they are; the run started from a folder."""
    private = tmp_path / "private"
    (private / "start").mkdir(parents=True)
    data = shards(private / "data")
    start, tokenizer = config_of(data, tmp_path / "unused"), load_tokenizer(data)[0]
    write_encoder(build_encoder(start, tokenizer), tokenizer, private / "start")
    config = config_of(data, private / "run", encoder={"pretrained": str(private / "start"), "from_config": None})
    save(config, private / "run")
    run_training(config)
    export = private / "run/export"
    assert {str(path.relative_to(export)) for path in export.rglob("*") if path.is_file()} == EXPORTED
    for name in EXPORTED:
        for place in (tmp_path, Path.home(), Path.cwd(), "private"):
            assert str(place).encode() not in (export / name).read_bytes(), f"{name} names {place}"
    settings = json.loads((export / "declutr.json").read_bytes())["config"]
    assert (settings["run"], settings["encoder"]["pretrained"], settings["steps"]) == ("(a path)", "(a path)", 6)
    texts = ["some words", "others"]
    expected = load_encoder(private / "run", device="cpu")
    assert expected.pretrained == config.encoder.pretrained, "the run knows it"
    shutil.copytree(export, tmp_path / "got")
    got = SentenceTransformer(str(tmp_path / "got"), device="cpu").encode(texts)
    np.testing.assert_allclose(got, expected.encode(texts), atol=1e-5)


def test_a_card_has_an_empty_licence_and_no_path(tmp_path):
    settings = {"encoder": str(tmp_path), "corpus": [f"{tmp_path}/*.jsonl", "~/x", "s3://b/k"], "seed": 3, "x": "a/b"}
    same = {"method": "Adapted.", "scores": "better", "data": "9 documents", "settings": settings}
    text = Card(title="Mine", base="owner/start", pooling="mean", layers=False, tags=("declutr",), **same).text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["license"], head["base_model"]) == (None, "owner/start")
    assert head["tags"] == ["sentence-transformers", "feature-extraction", "declutr"]
    assert str(tmp_path) not in text
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    assert shown == {"encoder": "(a path)", "corpus": ["(a path)"] * 3, "seed": 3, "x": "a/b"}
    says(text.splitlines(), "field `license`", "at the head")


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_without_cls"])
def test_the_lines_of_a_card_give_the_embeddings(tmp_path, pooling):
    folder = encoder_folder(tmp_path / "encoder", pooling=pooling)
    same = {"method": "", "scores": "", "data": "", "settings": {}, "layers": False}
    text = Card(title="Mine", base=None, pooling=pooling, **same).text().replace("path/to/this/folder", str(folder))
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    assert len(blocks) == 2 - (pooling == "mean_without_cls")
    expected = load_encoder(folder, device="cpu").encode(["A sentence."])
    for block in blocks:
        exec(re.sub("^    ", "", block, flags=re.MULTILINE), names := {})
        np.testing.assert_allclose(np.asarray(names["embeddings"].tolist()), expected, atol=1e-5)
