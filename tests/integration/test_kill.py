"""A killed worker is replaced, and the run ends in the same bits as one that nobody touched.

What else can happen to a run is in the fault matrix: `make chaos-short`.
"""

import os
import signal

import pytest
import ray
import tinyruns as runs

from common.storage import hash_file
from trainer.train import train

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 500
CHANGES = {
    "encoder": {"dropout": 0.1},
    "objective": {"queue_size": 24},
    "steps": STEPS,
    "validation": {"every_steps": 50},
    "checkpoint": {"every_steps": 5},
    "scaling": {"workers": 2},
}


@pytest.fixture(scope="module")
def untouched(data, tmp_path_factory):
    """The run that is never killed."""
    run = tmp_path_factory.mktemp("untouched") / "run"
    train(runs.train_config(data, run, **CHANGES))
    ray.shutdown()
    assert list(runs.steps_of(run)) == list(range(1, STEPS + 1))
    return run


def start(data, folder):
    config = runs.write_config(folder / "train.yaml", train=runs.train_values(data, folder / "run", **CHANGES))
    return runs.start_command("trainer.train", config, folder / "run")


def assert_same_bits(run, untouched):
    assert runs.steps_of(run) == runs.steps_of(untouched)
    assert runs.steps_of(run, "validation") == runs.steps_of(untouched, "validation")
    names = ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors")
    for name in [f"checkpoints/step-{STEPS:08d}/{name}" for name in names] + ["export/model.safetensors"]:
        assert hash_file(run / name) == hash_file(untouched / name), name


def test_a_killed_worker_is_replaced_and_the_bits_stay(data, untouched, tmp_path):
    driver, before = start(data, tmp_path)
    runs.wait_for_step(driver, before, tmp_path / "run", 22)
    workers = runs.train_workers(driver.pid)
    assert len(workers) == 2
    everything = runs.descendants(driver.pid)
    os.kill(workers[1], signal.SIGKILL)
    out, err = driver.communicate(timeout=200)
    assert driver.returncode == 0, err
    assert f"{STEPS} steps" in out
    assert "Traceback" not in err
    assert_same_bits(tmp_path / "run", untouched)
    assert runs.wait_gone(everything) == {}
