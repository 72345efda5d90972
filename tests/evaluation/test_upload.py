"""An export as others get it: its card, and nothing of this machine in what `hf upload` sends to a local hub."""

import base64
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from folders import encoder_folder
from madeup import config_of, save, shards
from messages import says
from sentence_transformers import SentenceTransformer
from serving import Handler, serving

from declutr.encoders.loading import load_encoder
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.driver.export import write_encoder
from declutr.trainer.driver.model_card import Card
from declutr.trainer.train import run_training

EXPORTED = {
    *("1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors"),
    *("modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "declutr.json"),
}


@contextmanager
def upload_server(repositories):
    """The answers of the Hub that sending needs, for models `{"owner/name": {path: bytes}}`; yields its address."""

    class Hub(Handler):
        def do_GET(self):
            name = "/".join(self.path.split("?")[0].split("/")[3:5])
            if not self.path.startswith("/api/models/"):
                self.answer(200, {})
            elif name not in repositories:
                self.answer(404, {}, [("X-Error-Code", "RepoNotFound")])
            elif "/tree/" in self.path:
                self.answer(200, [{"type": "file", "path": path, "size": 1, "oid": "0"} for path in repositories[name]])
            else:
                self.answer(200, {"id": name, "sha": "0" * 40, "siblings": [], "tags": [], "private": True})

        do_HEAD = do_GET

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if self.path == "/api/repos/create":
                given = json.loads(body)
                assert given.get("visibility") == "private" or given.get("private") is True
                name = f"{given['organization']}/{given['name']}"
                status = 409 if name in repositories else 200
                repositories.setdefault(name, {})
                self.answer(status, {"url": f"http://{self.headers['Host']}/{name}"})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                self.answer(200, {"files": modes})
            elif "/commit/" in self.path:
                name = "/".join(self.path.split("/")[3:5])
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                commit = f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}"
                self.answer(200, {"commitUrl": commit, "commitOid": "0" * 40})
            else:
                self.answer(200, {"errors": [], "warnings": []})  # of the card's head

    with serving(Hub) as host:
        yield f"http://{host}"


@pytest.fixture
def run(tmp_path):
    """A finished run that started from an encoder in a folder."""
    (tmp_path / "private").mkdir()
    data = shards(tmp_path / "private" / "data")
    start = config_of(data, tmp_path / "unused")
    tokenizer = load_tokenizer(data)[0]
    (tmp_path / "private" / "start").mkdir()
    write_encoder(build_encoder(start, tokenizer), tokenizer, tmp_path / "private" / "start")
    settings = {"pretrained": str(tmp_path / "private" / "start"), "from_config": None}
    config = config_of(data, tmp_path / "private" / "run", encoder=settings)
    save(config, tmp_path / "private" / "run")
    run_training(config)
    return tmp_path / "private" / "run", config


@pytest.mark.slow
def test_what_hf_sends_of_an_export_names_no_folder_and_loads(run, tmp_path):
    folder, config = run
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    kept |= {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    repositories = {}
    with upload_server(repositories) as address:
        sent = subprocess.run(
            [Path(sys.executable).with_name("hf"), "upload", "owner/mine", folder / "export", "--private"],
            env=kept | {"HF_ENDPOINT": address},
            capture_output=True,
            text=True,
        )
        assert sent.returncode == 0, sent.stderr
    files = repositories["owner/mine"]
    assert set(files) == EXPORTED
    for name, content in files.items():
        for place in (tmp_path, Path.home(), Path.cwd(), "private"):
            assert str(place).encode() not in content, f"{name} names {place}"
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(content)
    settings = json.loads(files["declutr.json"])["config"]
    assert (settings["run"], settings["encoder"]["pretrained"], settings["steps"]) == ("(a path)", "(a path)", 6)
    texts = ["some words", "others"]
    expected = load_encoder(folder, device="cpu")
    assert expected.pretrained == config.encoder.pretrained, "the run knows it"
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
