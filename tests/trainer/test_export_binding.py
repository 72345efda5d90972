"""An export is of the very checkpoint it is reported for, and whole; otherwise it is made again."""

import json
import shutil

import pytest
import tinyruns as runs
from shardfolders import write
from transformers import AutoTokenizer

from pipeline.manifest import load_manifest
from pipeline.tokenization import describe_tokenizer, train_tokenizer
from trainer import checkpoint
from trainer.export import SETTINGS, export
from trainer.objectives import Declutr
from trainer.optim import build_optimizer
from trainer.parts import build_encoder
from trainer.state import RunState

FILES = ("model.safetensors", "config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "README.md")


def save(config, run, step, seed):
    """A checkpoint with weights of that seed, as a run would leave it."""
    tokenizer = AutoTokenizer.from_pretrained(f"{config.data}/tokenizer")
    encoder = build_encoder(config.model_copy(update={"seed": seed}), tokenizer)
    objective = Declutr(config.objective, 2, 2)
    contents = checkpoint.collect(encoder, build_optimizer(config.optim, encoder), objective)
    facts = {"step": step, "documents": 8, "world_size": 1, "config_hash": "c", "data_hash": "d"}
    checkpoint.save(run / "checkpoints", RunState(**facts, scores={}, files={}), contents)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A configuration, and a run with one checkpoint and its export."""
    root = tmp_path_factory.mktemp("made")
    data = write(root / "data")
    tokenizer = train_tokenizer(["some words and others"] * 20, 300)
    tokenizer.save_pretrained(data / "tokenizer")
    manifest = load_manifest(data)
    changed = manifest.model_copy(update={"tokenizer": describe_tokenizer(tokenizer, "train")})
    (data / "manifest.json").write_text(changed.model_dump_json())
    config = runs.train_config(data, root / "run")
    save(config, root / "run", 6, seed=0)
    export(config, root / "run")
    return config, root / "run"


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made[1], tmp_path / "run")
    return tmp_path / "run"


def truncated(path):
    path.write_bytes(path.read_bytes()[:-10])


def emptied(path):
    path.write_bytes(b"")


def flipped(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def removed(path):
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, truncated) for name in (*FILES, SETTINGS)]
    + [(name, damage) for name in (FILES[0], SETTINGS) for damage in (emptied, flipped, removed)],
)
def test_a_damaged_export_is_made_again_and_nothing_is_lost(made, run, log, name, damage):
    whole = contents(run / "export")
    damage(run / "export" / name)
    damaged = contents(run / "export")
    export(made[0], run)
    assert contents(run / "export") == whole
    assert any(name in line and "exporting again" in line for line in log)
    assert contents(run / "export.kept-1") == damaged


def test_a_whole_export_is_left_alone_with_what_others_put_there(made, run, log):
    (run / "export" / "onnx").mkdir()
    (run / "export" / "onnx" / "model.onnx").write_text("theirs")
    before = {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")}
    export(made[0], run)
    assert {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")} == before
    assert log == []


@pytest.mark.parametrize("others", [False, True])
def test_the_export_of_another_checkpoint_with_the_same_step_gives_way(made, run, log, others):
    old = contents(run / "export")
    if others:
        (run / "export" / "notes.txt").write_text("theirs")
    shutil.rmtree(run / "checkpoints")
    save(made[0], run, 6, seed=1)
    export(made[0], run)
    new = contents(run / "export")
    assert new["model.safetensors"] != old["model.safetensors"]
    assert any("was made from another checkpoint" in line for line in log)
    assert (run / "export.kept-1" / "notes.txt").is_file() == others


def test_an_export_of_an_older_version_is_made_again_once(made, run, log):
    settings = json.loads((run / "export" / SETTINGS).read_text())
    whole = contents(run / "export")
    old = {key: settings[key] for key in ("step", "pooling", "config")}
    (run / "export" / SETTINGS).write_text(json.dumps(old))
    export(made[0], run)
    assert contents(run / "export") == whole
    assert any("a checkpoint that it does not name" in line for line in log)
    log.clear()
    export(made[0], run)
    assert log == []
