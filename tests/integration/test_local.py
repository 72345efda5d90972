"""A run in the process of the command takes the steps of a worker group, to the bit, and stops on a signal."""

import shutil
from pathlib import Path

import pytest
import tinyruns as runs

from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.driver.run import run_training
from declutr.trainer.metrics.metrics import read_metrics


def test_local_run_has_the_steps_and_weights_of_a_group(data, finished, tmp_path):
    summary = run_training(runs.finished_config(data, tmp_path / "run", scaling={"num_workers": 0}))
    assert summary["steps"] == 8
    for kind in ("step", "validation"):
        assert runs.steps_of(tmp_path / "run", kind) == runs.steps_of(finished / "run", kind)
    for name in ("encoder.safetensors", "optimizer.safetensors"):
        one, other = (run / "checkpoints" / "step-00000008" / name for run in (tmp_path / "run", finished / "run"))
        assert hash_file(one) == hash_file(other)


def test_group_run_is_continued_without_ray(data, copied, finished):
    for folder in (copied / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 6:
            shutil.rmtree(folder)
    (copied / "summary.json").unlink()
    assert run_training(runs.finished_config(data, copied, scaling={"num_workers": 0}))["steps"] == 8
    assert runs.steps_of(copied) == runs.steps_of(finished / "run")
    assert steps_in(copied / "checkpoints")[-1] == 8


@pytest.mark.parametrize("change", [{"address": "auto"}, {"fsdp": True}, {"spot_notices": "aws"}])
def test_settings_of_ray_are_refused(change):
    with pytest.raises(ValueError, match="num_workers = 0 trains without Ray"):
        runs.least_config(scaling={"num_workers": 0} | change)


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
