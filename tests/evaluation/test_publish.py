"""An encoder as others get it: files of a list, a card with a licence, no path of this machine; a local hub."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml
from folders import TEXTS, encoder_folder
from hubuploads import upload_server
from messages import says
from sentence_transformers import SentenceTransformer

from declutr.cli.main import main
from declutr.encoders.loading import load_encoder
from declutr.trainer.driver.model_card import Card

PUBLISHED = {
    *("1_Pooling/config.json", "README.md", "config.json", "config_sentence_transformers.json", "model.safetensors"),
    *("modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"),
}


@pytest.fixture
def encoder(tmp_path):
    """The output of an adaptation with an encoder, and files that nobody else may get."""
    folder = encoder_folder(tmp_path / "adapted" / "encoder", pooling="mean")
    (tmp_path / "adapted" / "result.json").write_text('{"outcome": "better"}')
    (tmp_path / "adapted" / "state.json").write_text("{}")
    settings = {"encoder": str(tmp_path), "corpus": [f"{tmp_path}/*.jsonl", "~/x", "s3://b/k"], "seed": 3, "x": "a/b"}
    same = {"method": "Adapted.", "scores": "better: +0.9 (+0.5 to +1.4)", "data": "9 documents", "settings": settings}
    card = Card(title="Mine", base="owner/start", pooling="mean", layers=False, tags=("declutr",), **same)
    (folder / "README.md").write_text(card.text())
    for name in ("optimizer.safetensors", "documents.jsonl", "declutr_log.txt", "whitening.json", "pytorch_model.bin"):
        (folder / name).write_text(str(tmp_path))
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "model.safetensors").write_text("state")
    return tmp_path / "adapted"


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_published_folder_has_the_files_of_the_list_alone_and_loads(encoder, tmp_path, capsys):
    assert main(["publish", str(encoder), str(tmp_path / "out"), "--license", "Apache-2.0"]) == 0
    says(capsys.readouterr().out, "not part of it", "optimizer.safetensors", "documents.jsonl", "pytorch_model.bin")
    assert files_in(tmp_path / "out") == PUBLISHED
    expected = load_encoder(encoder / "encoder", device="cpu").encode(TEXTS[:3])
    found = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS[:3])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    text = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert (head["license"], head["base_model"]) == ("apache-2.0", "owner/start")
    assert head["tags"] == ["sentence-transformers", "feature-extraction", "declutr"]
    assert str(tmp_path) not in text
    settings = json.loads(text.split("```json\n")[1].split("```")[0])
    assert settings == {"encoder": "(a path)", "corpus": ["(a path)"] * 3, "seed": 3, "x": "a/b"}
    assert main(["publish", str(encoder), str(tmp_path / "out"), "--license", "mit"]) == 1
    says(capsys.readouterr().err, tmp_path / "out", "exists already")


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


@pytest.mark.parametrize("target", ["encoder/sub", "../file/out"])
def test_a_target_that_cannot_be_written_is_refused(encoder, tmp_path, capsys, target):
    (tmp_path / "file").write_text("")
    before = files_in(tmp_path)
    assert main(["publish", str(encoder), str(encoder / target), "--license", "mit"]) == 1
    says(capsys.readouterr().err, encoder / target)
    assert files_in(tmp_path) == before


def break_licence(folder):
    card = folder / "README.md"
    card.write_text(card.read_text().replace("license:", "licence:"))


def add_path(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": str(folder)}))


def add_link(folder):
    (folder / "vocab.txt").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        (None, [], ("license", "empty", "--license")),
        (None, ["--license", "apache2"], ("license = apache2", "apache-2.0", "other")),
        (None, ["--license", "MIT OR Apache-2.0"], ("license = MIT OR Apache-2.0",)),
        (None, ["--license", ""], ("license", "empty")),
        (break_licence, ["--license", "mit"], ("README.md", "`license`")),
        (lambda folder: (folder / "README.md").write_bytes(b"\xff"), ["--license", "mit"], ("README.md", "UTF-8")),
        (lambda folder: (folder / "README.md").unlink(), ["--license", "mit"], ("README.md", "missing")),
        (lambda folder: (folder / "model.safetensors").unlink(), ["--license", "mit"], ("model.safetensors",)),
        (add_path, ["--license", "mit"], ("config.json", "folder of this machine")),
        (add_link, ["--license", "mit"], ("vocab.txt", "link")),
    ],
)
def test_what_cannot_be_published_is_refused_and_nothing_is_written(encoder, tmp_path, capsys, change, options, told):
    if change:
        change(encoder / "encoder")
    assert main(["publish", str(encoder), str(tmp_path / "out"), *options]) == 1
    says(capsys.readouterr().err, *told)
    assert not (tmp_path / "out").exists()


def test_a_licence_in_the_card_is_enough(encoder, tmp_path):
    card = encoder / "encoder" / "README.md"
    card.write_text(card.read_text().replace("license:\n", "license: cc-by-4.0\n"))
    assert main(["publish", str(encoder), str(tmp_path / "out")]) == 0


def test_an_adaptation_without_an_encoder_and_other_folders_are_refused(encoder, tmp_path, capsys):
    (encoder / "encoder").rename(tmp_path / "moved")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for model, told in ((encoder, "no encoder"), (tmp_path / "run", "not exported"), ("nowhere", "no folder")):
        assert main(["publish", str(model), str(tmp_path / "out"), "--license", "mit"]) == 1
        says(capsys.readouterr().err, model, told)


@pytest.mark.slow
def test_an_onnx_export_next_to_it_is_published_and_one_of_another_encoder_is_refused(encoder, tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="pip install -e '.[onnx]'")
    exporting = ["export", str(encoder / "encoder"), "--to", "onnx", "--output", str(encoder / "onnx")]
    assert main(exporting) == 0
    assert main(["publish", str(encoder), str(tmp_path / "out"), "--license", "mit"]) == 0
    onnx = {"onnx/model.onnx", "onnx/tokenizer.json", "onnx/declutr_onnx.json"}
    assert files_in(tmp_path / "out") == PUBLISHED | onnx
    text = (tmp_path / "out" / "README.md").read_text()
    (block,) = [one for one in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE) if "onnxruntime" in one]
    code = re.sub("^    ", "", block, flags=re.MULTILINE).replace('"onnx/', f'"{tmp_path}/out/onnx/')
    exec(code, names := {})
    expected = load_encoder(encoder / "encoder", device="cpu").encode(["A sentence."])
    np.testing.assert_allclose(names["embeddings"], expected, atol=1e-4)
    assert "integers" not in text
    assert "prompt" not in text
    (tmp_path / "other").mkdir()
    other = encoder_folder(tmp_path / "other" / "encoder", pooling="cls")
    (other / "README.md").write_text((encoder / "encoder" / "README.md").read_text())
    (encoder / "onnx").rename(tmp_path / "other" / "onnx")
    assert main(["publish", str(other), str(tmp_path / "two"), "--license", "mit"]) == 1
    says(capsys.readouterr().err, tmp_path / "other" / "onnx", "another encoder", "export it again")


@pytest.mark.slow
def test_a_graph_in_integers_is_published_with_its_form_its_scores_and_its_prompt(encoder, tmp_path):
    """The scores of the card are those of the encoder in float32."""
    pytest.importorskip("onnxscript", reason="pip install -e '.[onnx]'")
    options = {"prompts": {"document": "text: "}, "default_prompt_name": "document"}
    (encoder / "encoder" / "config_sentence_transformers.json").write_text(json.dumps(options))
    rows = (f"a\tb\tc\td\t{number % 6}\ttext {number}\tword text {number % 5}\n" for number in range(12))
    (tmp_path / "sts-test.csv").write_text("".join(rows))
    exporting = ["export", str(encoder / "encoder"), "--to", "onnx-int8", "--output", str(encoder / "onnx")]
    assert main([*exporting, "--stsb", str(tmp_path)]) == 0
    assert main(["publish", str(encoder), str(tmp_path / "out"), "--license", "mit"]) == 0
    figures = json.loads((encoder / "onnx" / "measurement.json").read_text())
    text = (tmp_path / "out" / "README.md").read_text()
    lines, scores = text.splitlines(), text.index("\n## Scores\n")
    says(lines, "8-bit integers", "scores below", "float32")
    says(lines, "cosine", f"{figures['cosine']:.4f}", f"{figures['cosine_least']:.4f}")
    says(lines, "STS-B", f"{figures['stsb_before']:.2f}", f"{figures['stsb_after']:.2f}")
    says(lines, "prompt", repr("text: "))
    assert text.index("onnxruntime") < text.index("8-bit integers") < scores
    assert json.loads((tmp_path / "out/onnx/declutr_onnx.json").read_text())["form"] == "onnx-int8"
    settings = json.loads((encoder / "onnx" / "declutr_onnx.json").read_text())
    del settings["form"]  # an earlier export; its measurement names the form
    (encoder / "onnx" / "declutr_onnx.json").write_text(json.dumps(settings))
    assert main(["publish", str(encoder), str(tmp_path / "again"), "--license", "mit"]) == 0
    assert (tmp_path / "again" / "README.md").read_text() == text
    (encoder / "onnx" / "measurement.json").unlink()
    assert main(["publish", str(encoder), str(tmp_path / "none"), "--license", "mit"]) == 1


def publish(arguments, folder, **environment):
    """The command in a process of its own, because huggingface_hub reads the environment at its import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-m", "declutr.cli.main", "publish", *arguments],
        cwd=folder,
        env=kept | {"HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_hub_gets_the_files_only_with_yes_a_token_and_an_empty_name(encoder, tmp_path):
    repositories = {"owner/full": {"model.safetensors": b""}}
    mine = [str(encoder), "owner/mine", "--license", "mit"]
    with upload_server(repositories) as address:
        token = {"HF_ENDPOINT": address, "HF_TOKEN": "hf_x"}
        planned = publish(mine, tmp_path, **token)
        assert planned.returncode == 1
        says(planned.stderr, "owner/mine", "nothing was sent", "--yes", "./owner/mine")
        says(planned.stdout, "bytes", "model.safetensors")
        assert list(repositories) == ["owner/full"]
        anonymous = publish([*mine, "--yes"], tmp_path, HF_ENDPOINT=address)
        says(anonymous.stderr, "token", "hf auth login", "HF_TOKEN")
        full = publish([str(encoder), "owner/full", "--license", "mit", "--yes"], tmp_path, **token)
        says(full.stderr, "owner/full", "exists already")
        sent = publish([*mine, "--yes"], tmp_path, **token)
        assert sent.returncode == 0, sent.stderr
        says(sent.stdout, f"{address}/owner/mine", "private")
        assert set(repositories["owner/mine"]) == PUBLISHED
        assert b'SentenceTransformer("owner/mine")' in repositories["owner/mine"]["README.md"]
        weights = (encoder / "encoder" / "model.safetensors").read_bytes()
        assert repositories["owner/mine"]["model.safetensors"] == weights
    gone = publish([*mine, "--yes"], tmp_path, **token)
    assert gone.returncode == 1
    says(gone.stderr, "owner/mine", "not reached")
    assert len(gone.stderr.splitlines()) == 1
