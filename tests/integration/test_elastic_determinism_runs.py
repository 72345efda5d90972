"""Runs with `scaling.elastic_determinism`: the same files and numbers with any, also changing, number of workers."""

import pytest
import tinyruns as runs

from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.train import train

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("session")]
FILES = ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors")


def trained(data, run, workers):
    scaling = {"num_workers": workers, "elastic_determinism": True}
    kept = {"every_steps": 2, "keep_last": 2, "keep_every_steps": 2}
    train(runs.train_config(data, run, **runs.FINISHED | {"scaling": scaling, "checkpoint": kept}))
    return run


def results(run):
    """Checksums of the weights and moments of each checkpoint, and the lines of steps and validations."""
    sums = {
        f"{step} {name}": hash_file(run / "checkpoints" / f"step-{step:08d}" / name)
        for step in steps_in(run / "checkpoints")
        for name in FILES
    }
    sums["export"] = hash_file(run / "export" / "model.safetensors")
    return sums, runs.steps_of(run), runs.steps_of(run, "validation")


def test_two_then_three_workers_then_none_are_one_process(data, tmp_path):
    alone = results(trained(data, tmp_path / "alone", 0))
    assert len(alone[0]) == 4 * len(FILES) + 1
    assert len(alone[1]) == 8
    two = trained(data, tmp_path / "two", 2)
    assert results(two) == alone
    three = trained(data, runs.cut(two, tmp_path / "three", 2), 3)
    assert results(three) == alone
    one = trained(data, runs.cut(three, tmp_path / "one", 6), 0)
    assert results(one) == alone
