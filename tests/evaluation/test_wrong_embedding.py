"""Encoders, inputs and outputs that `declutr embed` cannot use: one message that names the option, and no work."""

import json
import logging

import pytest
from messages import all_of, says

import declutr
from declutr.cli.main import main

FILES = {
    "a.txt": "Bread is baked.\n\nBoats float.\n",
    "body.jsonl": '{"body": "a", "id": 1}\n{"body": "b", "id": null}\n',
    "one.jsonl": '{"body": "a"}\n',
    "late.jsonl": '{"kind": "head"}\n' * 2 + '{"text": "a"}',
    "ids.jsonl": '{"text": "a", "id": 1.5}\n',
    "good.jsonl": '{"text": "a", "id": "1"}\n',
    "array.jsonl": '[{"text": "a"}]\n',
    "picture.png": "\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "folder/a.md": "# A title",
    "folder/z.json": '{"x": 1}',
    "own.npy.json": '{"mine": 1}',
    "full.npy": "0",
    "full.npy.json": "[]",
    "note.npy": "0",
    "note.npy.json": '{"fingerprint": "", "num_bytes": 1}',
    "model/config.json": "{}",
    "empty.txt": "",
    "head.csv": "text\n",
    "row.csv": "text\na\n",
}
HW = "hashed-words:64"
OUT = ["--output", "out.npy"]
PARQUET = ["--output", "out.parquet"]
WRONG = [
    (["embed", "untrained:{}/modle", "a.txt", *OUT], ("modle cannot be loaded", "no such folder", "`{}/model`")),
    (["embed", "untrained:{}/folder", "a.txt", *OUT], ("folder is no encoder",)),
    (["adapt", "untrained:{}/model", "a.txt", "--output", "out"], ("untrained:{}/model is a baseline",)),
    (["export", "untrained:{}/modle", "--to", "onnx", "--output", "x"], ("{}/modle cannot be loaded",)),
    (["embed", "hashedwords:64", "a.txt", *OUT], ("hashedwords:64", "write hashed-words:SIZE")),
    (["embed", "hashed-words", "a.txt", *OUT], ("hashed-words cannot", "write hashed-words:SIZE")),
    (["embed", "hashed-word", "a.txt", *OUT], ("hashed-word cannot", "write hashed-words:SIZE")),
    (["embed", "hashed-words:65537", "a.txt", *OUT], ("hashed-words:65537", "from 1 to 65,536")),
    (["embed", f"hashed-words:{'9' * 5000}", "a.txt", *OUT], ("from 1 to 65,536",)),
    (["embed", "model", "head.csv", "empty.txt", *OUT], ("head.csv, {}/empty.txt: holds no texts",)),
    (["index", ".", "--output", "x"], (".: is a folder; name a file of embeddings",)),
    (["index", "note.npy.json", "--output", "x"], ("note.npy.json: is a note", "name the embeddings note.npy")),
    (["index", "full.npy", "--output", "x"], ("full.npy.json: is no note of this version", "embed again")),
    (["embed", HW, "a.txt", "--output", "/"], ("--output /: must end in .npy or .parquet",)),
    (["embed", HW, "loop", *OUT], ("input", "loop", "matches no file")),
    (["embed", HW, "a.txt", *PARQUET, "--id-field", "id"], ("--id-field id", "a.txt", "no keys or columns")),
    (["embed", HW, "folder", *PARQUET, "--id-field", "id"], ("--id-field id", "a.md", "no keys or columns")),
    (["embed", HW, "body.jsonl", *OUT], ("--text-field = text", "body.jsonl", "no key 'text'", "found body, id")),
    (["embed", HW, "one.jsonl", *OUT], ("one.jsonl", "found body", "--text-field names", "--skip-bad skips")),
    (["embed", HW, "array.jsonl", *OUT], ("array.jsonl", "a list", "one JSON array, set --format to json")),
    (["embed", HW, "picture.png", *OUT], ("picture.png", "unknown", "no text; name files with texts")),
    (["embed", HW, "ids.jsonl", *PARQUET, "--id-field", "id"], ("a number. --id-field names", "--skip-bad")),
    (["embed", HW, "good.jsonl", *PARQUET, "--id-field", "nr"], ("{}/good.jsonl at 0: no_id: no key 'nr'",)),
    (["embed", HW, "row.csv", *PARQUET, "--id-field", "text", "--text-field", "b"], ("--text-field = b: {}/row.csv",)),
    (["embed", HW, "a.txt", *OUT, "--dimensions", "-1"], ("--dimensions -1: Input should be greater",)),
    (["embed", HW, "a.txt", *OUT, "--unit-mib", "0"], ("--unit-mib 0.0: Input should be greater",)),
    (["embed", HW, "a.txt", *OUT, "--max-tokens", "0"], ("--max-tokens 0: Input should be greater",)),
    (["embed", HW, "a.txt", *OUT, "--pooling", "cls"], (HW, "--pooling cls has no effect on hashed words")),
    (["embed", HW, "a.txt", *OUT, "--max-tokens", "9"], (HW, "--max-tokens 9 has no effect on hashed words")),
    (["embed", HW, "a.txt", "--output", "own.npy"], ("--output", "own.npy.json exists without its embeddings; name")),
    (["embed", HW, "a.txt", "--output", "full.npy"], ("--output", "full.npy exists without its note; name")),
    (["embed", HW, "a.txt", "--output", "/proc/x.npy"], ("--output /proc/x.npy", "nothing can be written in /proc")),
    (["embed", HW, "a.txt", "--output", f"{'x' * 251}.npy"], ("--output", "its name is too long by")),
    (["export", "model", "--to", "onnx", "--output", "x", "--dimensions", "4"], ("--dimensions: has no effect",)),
    (["export", "model", "--to", "static", "--output", "x", "--max-tokens", "4"], ("--max-tokens: has no effect",)),
    (["export", "model", "--to", "static", "--output", "x", "--dimensions", "1"], ("--dimensions 1: Input should be",)),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("declutr"), "handlers", [])  # of the test before, whose stream is closed
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize(("arguments", "words"), WRONG, ids=[" ".join(words)[:70] for words, _ in WRONG])
def test_wrong_use_of_an_encoder_names_the_option_and_writes_nothing(place, capsys, arguments, words):
    before = {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()}
    assert main([argument.replace("{}", str(place)) for argument in arguments]) == 1
    says(capsys.readouterr().err, *(word.replace("{}", str(place)) for word in words))
    assert {path: path.lstat().st_mtime_ns for path in place.rglob("*") if not path.is_dir()} == before


def test_files_that_embed_leaves_out_and_embeddings_that_it_replaces_are_named(place, capsys):
    assert main(["embed", HW, "folder", *OUT]) == 0
    says(shown := capsys.readouterr().err, "z.json", "(--text-field)")
    assert "corpus." not in shown
    assert main(["embed", HW, "a.txt", *OUT]) == 0
    shown = capsys.readouterr()
    says(shown.err, "out.npy has embeddings of", "folder", "replaced")
    says(shown.out, "empty texts: 1", "--format auto_text_file")
    assert json.loads((place / "out.npy.json").read_text())["texts_empty"] == 1
    assert main(["embed", "hashed-words:32", "a.txt", *OUT, "--normalise"]) == 1
    facts = "out.npy: was made with model = hashed-words:64, not hashed-words:32, normalise = False, not True; name"
    says(capsys.readouterr().err, "--output", facts)
    assert main(["embed", HW, "a.txt", *OUT]) == 0
    assert main(["embed", HW, "one.jsonl", *PARQUET, "--skip-bad"]) == 0
    says(capsys.readouterr().err, "nothing is embedded", "--text-field")
    (place / "latin.txt").write_bytes(b"caf\xe9\n")
    assert main(["embed", HW, "latin.txt", "--output", "latin.npy"]) == 1
    says(
        capsys.readouterr().err,
        "latin.txt at 0: invalid_utf8",
        "write it in UTF-8; --skip-bad",
        "into an --output that",
    )
    assert main(["embed", HW, "late.jsonl", "--output", "late.parquet", "--skip-bad"]) == 0
    assert main(["embed", HW, "good.jsonl", "--output", "ids.parquet", "--id-field", "id"]) == 0


@pytest.mark.parametrize("units", [0, 1])
def test_finished_units_are_promised_only_if_there_are_some(place, monkeypatch, units):
    def fail(*_):
        (place / ".out.npy.parts").mkdir()
        (place / ".out.npy.parts" / ("00000.json" if units else "00000.arrow")).touch()
        raise OSError("no space")

    monkeypatch.setattr("declutr.embedding.job._embed", fail)
    with pytest.raises(declutr.UsageError, match="no space") as failure:
        declutr.embed(HW, "a.txt", "out.npy")
    assert ("Finished units are kept" in str(failure.value)) == units


def test_a_device_is_refused_before_the_encoder_is_looked_for():
    with pytest.raises(declutr.EncoderError, match=all_of("device = gpu", "must be cpu or cuda", "`cuda`")):
        declutr.load("./nowhere", device="gpu")


@pytest.mark.usefixtures("place")
def test_trust_is_true_or_false():
    for value in ("yes", 1):
        settings = {"trust_remote_code": value}
        with pytest.raises(declutr.ConfigError, match=all_of("  - trust_remote_code =", "valid boolean")):
            declutr.embed(HW, "a.txt", "out.npy", **settings)
        with pytest.raises(declutr.ConfigError, match=all_of("  - trust_remote_code =", "valid boolean")):
            declutr.load(HW, **settings)
        with pytest.raises(declutr.ConfigError, match=all_of("trust_remote_code =", "valid boolean")):
            declutr.export("model", "x", to="onnx", **settings)
