"""One process owns an output folder, `--plan` leaves it alone, and a full disk is words."""

import json
import subprocess
import sys

import pytest
from messages import says
from volumes import small_volume

from declutr.common.errors import RunLockedError
from declutr.common.lock import LOCK, RunLock
from declutr.pipeline.job.output import plan_of, write_plan
from declutr.pipeline.job.units import plan_units, with_file_states
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.prepare import main, plan_ahead, prepare, problems

HOLD = "import sys; from pathlib import Path; from declutr.common.lock import RunLock\n"
HOLD += "with RunLock(Path(sys.argv[1]), print): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(words[(i * n) % 7] + str(n) for i in range(60)) for n in range(100)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def given(tmp_path, make_config, corpus):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"prepare": make_config(corpus).model_dump(mode="json")}))
    return str(path)


def files(folder):
    """Contents and times; the time of a lock is its holder's sign of life."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path: (path.name != LOCK and path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_a_second_command_is_refused_with_words_and_changes_nothing(tmp_path, given, capsys, make_config, corpus):
    (tmp_path / "out").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "out")], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        before = files(tmp_path / "out")
        assert main([given]) == 1
        assert f"pid {holder.pid}" in capsys.readouterr().err
        assert main([given, "--plan"]) == 0
        assert files(tmp_path / "out") == before
        holder.kill()
        holder.wait()
    with RunLock(tmp_path / "out", print), pytest.raises(RunLockedError):
        prepare(make_config(corpus))


def test_plan_leaves_a_folder_at_work_as_it_is(make_config, corpus, output):
    folder, tokenizer = output
    config = make_config(corpus, unit_mib=0.01)
    units = with_file_states(plan_units(config.corpus, config.unit_mib)[0])
    write_plan(folder, plan_of(config, units))
    write_unit(units[0], folder, config, tokenizer)
    (folder / ".train-00001.arrow.1.tmp").write_text("being written")
    before = files(folder)
    plan_ahead(config)
    assert files(folder) == before


def test_plan_writes_nothing(tmp_path, make_config, corpus):
    before = files(tmp_path)
    assert plan_ahead(make_config(corpus)).documents == 100
    assert files(tmp_path) == before


@pytest.mark.parametrize("left", [0, 5_000, 9_000, 20_000])
def test_a_full_disk_is_words_and_the_same_command_continues(tmp_path, given, capsys, make_config, corpus, left):
    """Of the driver, before any task: the lock, the plan and the tokenizer are what is written first."""
    with small_volume(tmp_path / "volume", 1) as volume:
        output = f"output={volume.path / 'out'}"
        volume.fill(leave_bytes=left)
        assert main([given, output]) == 1
        error = capsys.readouterr().err
        says(error, "No space left on device")
        says(error, "same command")
        assert "Traceback" not in error
        assert not [path for path in volume.path.rglob("*") if path.name.endswith(".tmp")]
        volume.drain()
        assert problems(make_config(corpus, output=str(volume.path / "out"))) == []


def test_plan_on_a_full_disk_is_words(tmp_path, given, capsys, monkeypatch):
    with small_volume(tmp_path / "volume", 1) as volume:
        monkeypatch.setattr("tempfile.tempdir", str(volume.path))
        volume.fill()
        assert main([given, "--plan"]) == 1
        says(capsys.readouterr().err, "No space left on device")
        assert [path.name for path in volume.path.iterdir()] == ["ballast"]


def test_a_folder_that_is_not_ours_to_write_to_is_words(tmp_path, given, capsys):
    (tmp_path / "file").touch()
    assert main([given, f"output={tmp_path / 'file' / 'out'}"]) == 1
    assert "Traceback" not in capsys.readouterr().err
