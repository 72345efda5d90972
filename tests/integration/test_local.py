"""A run in the process of the command takes the steps of a worker group, to the bit, and stops on a signal."""

import shutil

import pytest
import tinyruns as runs

from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.driver.run import run_training


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
