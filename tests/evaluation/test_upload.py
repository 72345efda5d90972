"""An export as others get it: its card, and nothing of this machine in what `hf upload` sends to a local hub."""

import base64
import json
import os
import re
import subprocess
import sys
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


@pytest.fixture
def hub():
    """The answers of the Hub that sending to `owner/mine` needs; yields its address and the files that it has got."""
    files, created, commit = {}, [], "0" * 40

    class Hub(Handler):
        def do_GET(self):
            if self.path.startswith("/api/models/") and not created:
                self.answer(404, {}, [("X-Error-Code", "RepoNotFound")])
            elif "/tree/" in self.path:
                self.answer(200, [{"type": "file", "path": path, "size": 1, "oid": "0"} for path in files])
            else:
                self.answer(200, {"id": "owner/mine", "sha": commit, "siblings": [], "tags": [], "private": True})

        do_HEAD = do_GET

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            url = f"http://{self.headers['Host']}/owner/mine"
            if self.path == "/api/repos/create":
                settings = json.loads(body)
                assert settings.get("visibility") == "private" or settings.get("private") is True
                created.append(f"{settings['organization']}/{settings['name']}")
                self.answer(200, {"url": url})
            elif "/preupload/" in self.path:
                modes = {"uploadMode": "regular", "shouldIgnore": False}
                self.answer(200, {"files": [{"path": file["path"], **modes} for file in json.loads(body)["files"]]})
            elif "/models/owner/mine/commit/" in self.path:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(200, {"commitUrl": f"{url}/commit/{commit}", "commitOid": commit})
            else:
                self.answer(200, {"errors": [], "warnings": []})  # of the card's head

    with serving(Hub) as host:
        yield f"http://{host}", files
        assert created == ["owner/mine"]


@pytest.fixture
def run(tmp_path):
    """A finished run that started from an encoder in a folder."""
    folder = tmp_path / "private"
    (folder / "start").mkdir(parents=True)
    data = shards(folder / "data")
    tokenizer = load_tokenizer(data)[0]
    write_encoder(build_encoder(config_of(data, tmp_path / "unused"), tokenizer), tokenizer, folder / "start")
    config = config_of(data, folder / "run", encoder={"pretrained": str(folder / "start"), "from_config": None})
    save(config, folder / "run")
    run_training(config)
    return folder / "run", config


@pytest.mark.slow
def test_what_hf_sends_of_an_export_names_no_folder_and_loads(run, hub, tmp_path):
    (folder, config), (address, files) = run, hub
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings |= {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    command = [Path(sys.executable).with_name("hf"), "upload", "owner/mine", folder / "export", "--private"]
    sent = subprocess.run(command, env=settings | {"HF_ENDPOINT": address}, capture_output=True, text=True)
    assert sent.returncode == 0, sent.stderr
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
    settings |= {"scaling": {"address": "10.1.2.3:6379"}, "session": {"address": None}, "prompts": ["q:1"]}
    same = {"method": "Adapted.", "scores": "better", "data": "9 documents", "settings": settings}
    text = Card(title="Mine", base="owner/start", pooling="mean", layers=False, tags=("declutr",), **same).text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["license"], head["base_model"]) == (None, "owner/start")
    assert head["tags"] == ["sentence-transformers", "feature-extraction", "declutr"]
    assert str(tmp_path) not in text
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    hidden = {"encoder": "(a path)", "corpus": ["(a path)"] * 3, "scaling": {"address": "(a path)"}}
    assert shown == hidden | {"session": {"address": None}, "seed": 3, "x": "a/b", "prompts": ["q:1"]}
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
