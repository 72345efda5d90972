"""Killed runs continue, and end in the same bits as a run that nobody touched."""

import os
import signal

import pytest
import ray
import tinyruns as runs

from common.storage import hash_file
from trainer.checkpoint import steps_in
from trainer.train import train

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = 800  # a driver that is told to end takes seconds over it, in which its workers go on
# After SIGKILL of the driver these look for their dead head for about a minute, then end by themselves.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
CHANGES = {
    "encoder": {"dropout": 0.1},
    "objective": {"queue_size": 24},
    "steps": STEPS,
    "validation": {"every_steps": 200},
    "checkpoint": {"every_steps": 5, "every_seconds": None},
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


def test_a_killed_driver_leaves_nothing_and_the_same_command_continues(data, untouched, tmp_path):
    run = tmp_path / "run"
    done = 0
    agents = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        driver, before = start(data, tmp_path)
        runs.wait_for_step(driver, before, run, done + 16)  # at done + 15 the one of done + 10 was waited for
        everything = runs.descendants(driver.pid)
        assert len(runs.train_workers(driver.pid)) == 2
        os.kill(driver.pid, number)
        _, err = driver.communicate(timeout=60)
        assert driver.returncode != 0
        assert ("continuing after" in err) == (done > 0)
        agents |= {pid: title for pid, title in everything.items() if title.startswith(RAY_AGENTS)}
        others = {pid: title for pid, title in everything.items() if pid not in agents}
        assert runs.wait_gone(others) == {}, number
        assert done + 10 <= steps_in(run / "checkpoints")[-1] < STEPS
        done = steps_in(run / "checkpoints")[-1]
    driver, _ = start(data, tmp_path)
    _, err = driver.communicate(timeout=200)
    assert driver.returncode == 0, err
    assert f"continuing after step {done} of {STEPS}" in err
    assert_same_bits(run, untouched)
    assert runs.wait_gone(agents, timeout=120) == {}
