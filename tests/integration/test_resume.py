"""Which checkpoint a run continues from; a run in the process of the command."""

import shutil
from pathlib import Path

import pytest
import tinyruns as runs
from broken import flip_a_bit
from tinyruns import problems

from declutr.trainer.checkpoints.checkpoint import read_state, steps_in
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.train import run_training, train

pytestmark = pytest.mark.ray


def newest(run):
    return run / "checkpoints" / f"step-{steps_in(run / 'checkpoints')[-1]:08d}"


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_a_damaged_run_continues_from_the_step_before_on_another_number_of_workers(data, finished, copied, log):
    flip_a_bit(newest(copied) / "optimizer.safetensors")
    left_behind = copied / "checkpoints" / ".step-00000009.123.tmp"
    left_behind.mkdir()
    (left_behind / "encoder.safetensors").write_text("half")
    shutil.rmtree(copied / "export")
    moved = runs.finished_config(data, copied, scaling={"num_workers": 2}, checkpoint={"every_steps": 1})
    assert problems(moved) == []
    train(moved)
    assert any("broken checkpoint" in line and "step-00000008" in line for line in log)
    assert any("step 6 of 8" in line for line in log)
    before, after = runs.steps_of(finished / "run"), runs.steps_of(copied)
    assert list(after) == list(range(1, 9))
    assert {step: after[step] for step in range(1, 7)} == {step: before[step] for step in range(1, 7)}
    for step in (7, 8):  # dropout is keyed by each worker's place in the batch: another world draws other masks
        assert after[step]["batch_digest"] == before[step]["batch_digest"]
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=0.05)
    assert not left_behind.exists()
    assert read_state(newest(copied)).world_size == 2
    assert (copied / "export" / "model.safetensors").is_file()


def test_moved_run_with_relative_paths_continue_at_their_step(data, tmp_path, monkeypatch):
    """Workers get absolute paths, and must recognise checkpoints all the same."""
    (tmp_path / "here" / "sts").mkdir(parents=True)
    pairs = (f"a\tb\tc\t{number}\t{number % 6}\tone {number}\tother {number}\n" for number in range(9))
    (tmp_path / "here" / "sts" / "sts-dev.csv").write_text("".join(pairs))
    monkeypatch.chdir(tmp_path / "here")
    changes = {"validation": {"every_steps": 4, "stsb": "sts"}, "scaling": {"num_workers": 0}}
    config = runs.finished_config(data, "run", **changes)
    assert run_training(config)["steps"] == 8
    times = _times("run")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    shutil.rmtree(sorted(Path("run/checkpoints").glob("step-*"))[-1])
    Path("run/summary.json").unlink()
    assert run_training(config)["steps"] == 8
    assert _times("run")[:6] == times[:6]


def _times(run):
    return [line["time"] for line in read_metrics(Path(run)) if line["kind"] == "step"]
