"""An export is of the very checkpoint it is reported for, and whole; otherwise it is made again."""

import shutil

import pytest
import tinyruns as runs
from broken import empty, flip_a_bit, remove, truncate
from madeup import finish, save

from declutr.trainer.checkpoints.exported import SETTINGS
from declutr.trainer.driver.export import export

FILES = ("model.safetensors", "config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json", "README.md")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A configuration, and a run with one checkpoint and its export."""
    root = tmp_path_factory.mktemp("made")
    return finish(root), root / "run"


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made[1], tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, truncate) for name in (*FILES, SETTINGS)]
    + [(name, damage) for name in (FILES[0], SETTINGS) for damage in (empty, flip_a_bit, remove)],
)
def test_a_damaged_export_is_made_again_and_nothing_is_lost(made, run, log, name, damage):
    whole = contents(run / "export")
    damage(run / "export" / name)
    damaged = contents(run / "export")
    export(runs.resolved(made[0], run))
    assert contents(run / "export") == whole
    assert any(name in line and "exporting again" in line for line in log)
    assert contents(run / "export.kept-1") == damaged


def test_a_whole_export_is_left_alone_with_what_others_put_there(made, run, log):
    (run / "export" / "onnx").mkdir()
    (run / "export" / "onnx" / "model.onnx").write_text("theirs")
    before = {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")}
    export(runs.resolved(made[0], run))
    assert {path: path.stat().st_mtime_ns for path in (run / "export").rglob("*")} == before
    assert log == []


def test_an_export_that_a_kill_left_moved_aside_is_put_back(made, run):
    (run / "export" / "notes.txt").write_text("theirs")
    before = contents(run / "export")
    (run / "export").rename(run / ".export.before.tmp")
    export(runs.resolved(made[0], run))
    assert contents(run / "export") == before
    assert not (run / ".export.before.tmp").exists()


@pytest.mark.parametrize("others", [False, True])
def test_the_export_of_another_checkpoint_with_the_same_step_gives_way(made, run, log, others):
    old = contents(run / "export")
    if others:
        (run / "export" / "notes.txt").write_text("theirs")
    shutil.rmtree(run / "checkpoints")
    save(made[0], run, seed=1)
    export(runs.resolved(made[0], run))
    new = contents(run / "export")
    assert new["model.safetensors"] != old["model.safetensors"]
    assert any("another checkpoint" in line for line in log)
    assert (run / "export.kept-1" / "notes.txt").is_file() == others
