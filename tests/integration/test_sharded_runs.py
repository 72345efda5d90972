"""Runs with sharded parameters or elastic determinism: the numbers, files and export of a run that holds everything."""

import json

import pytest
import tinyruns as runs
from measures import deviation
from safetensors.torch import load_file

from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.train import train

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.usefixtures("session")]
FILES = ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors")


def config_of(data, run, workers, sharded, **changes):
    scaling = {"num_workers": workers, "fsdp": sharded}
    return runs.train_config(data, run, **runs.FINISHED | {"scaling": scaling} | changes)


@pytest.fixture(scope="module")
def sharded(data, tmp_path_factory):
    """A finished run of two workers with sharded parameters; else as `finished`."""
    run = tmp_path_factory.mktemp("sharded") / "run"
    train(config_of(data, run, workers=2, sharded=True))
    return run


def assert_close(run, other):
    for kind in ("step", "validation"):
        found, expected = runs.steps_of(run, kind), runs.steps_of(other, kind)
        assert list(found) == list(expected)
        for step, line in expected.items():
            assert found[step] == pytest.approx(line, rel=1e-3, abs=0.03 if kind == "validation" else 1e-9), step
    for name in (f"checkpoints/step-00000008/{FILES[0]}", "export/model.safetensors"):
        found, expected = load_file(run / name), load_file(other / name)
        assert found.keys() == expected.keys()
        assert deviation([found[key] for key in expected], expected.values()) < 1e-3, name


def test_a_sharded_run_is_the_run_that_is_not(finished, sharded):
    assert_close(sharded, finished / "run")
    assert json.loads((sharded / "checkpoints" / "step-00000008" / "state.json").read_text())["world_size"] == 2


def test_a_sharded_run_continues_to_the_bit(data, sharded, tmp_path):
    run = runs.cut(sharded, tmp_path / "run", last=6)
    train(config_of(data, run, workers=2, sharded=True))
    assert runs.steps_of(run) == runs.steps_of(sharded)
    assert runs.steps_of(run, "validation") == runs.steps_of(sharded, "validation")
    for name in [f"checkpoints/step-00000008/{name}" for name in FILES] + ["export/model.safetensors"]:
        assert hash_file(run / name) == hash_file(sharded / name), name


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
