"""A world that shrinks and grows under a run: the driver lives on, batches and losses are those of a quiet run."""

import os
import signal
import time

import pytest
import ray
import tinyruns as runs
from ray.cluster_utils import Cluster

from trainer.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.slow]
CHANGES = {
    "batch_documents": 7,  # divides by none of the worlds but 1
    "encoder": {"dropout": 0.1},
    "steps": 100_000,
    "checkpoint": {"every_steps": 10},
}
SCALING = {"device": "cpu", "cpus_per_worker": 2, "resize_seconds": 2}


@pytest.fixture(scope="module")
def cluster():
    """A head with room for one worker and for the tasks that read; a node more is a worker more."""
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 2000}
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "include_dashboard": False, "_system_config": quick},
    )
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def drivers():
    """Commands of a test; those that still run at its end are killed."""
    started = []
    yield started
    for driver in started:
        driver.kill()
        driver.wait()


def start(drivers, data, folder, cluster, workers):
    values = runs.train_values(data, folder / "run", **CHANGES)
    values["scaling"] = SCALING | {"workers": workers, "address": cluster.address}
    config = runs.write_config(folder / "train.yaml", train=values)
    driver, _ = runs.start_command("trainer.train", config, folder / "run")
    drivers.append(driver)
    return driver


def worlds(run):
    """The number of workers of every start so far, with the step it began with."""
    return [(line["workers"], line["step"]) for line in read_metrics(run) if line["kind"] == "start"]


def wait_for_world(driver, run, size, further_steps, timeout=400):
    """Until a group of that size has begun and taken so many steps."""
    deadline = time.monotonic() + timeout
    while True:
        began = worlds(run)
        last = max((line["step"] for line in read_metrics(run) if line["kind"] == "step"), default=0)
        if began and began[-1][0] == size and last >= began[-1][1] + further_steps:
            return
        assert driver.poll() is None, f"ended early: {driver.communicate()}"
        assert time.monotonic() < deadline, f"no world of {size}: {began}, step {last}"
        time.sleep(0.1)


def stop(driver):
    os.kill(driver.pid, signal.SIGTERM)
    _, err = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGTERM, err
    assert "stopped at step" in err
    return err


def test_two_three_one_and_two_workers_take_the_steps_of_a_quiet_run(data, cluster, drivers, tmp_path):
    quiet, changing = tmp_path / "quiet", tmp_path / "changing"
    for folder in (quiet, changing):
        folder.mkdir()
    second = cluster.add_node(num_cpus=2)
    driver = start(drivers, data, changing, cluster, [1, 3])
    wait_for_world(driver, changing / "run", 2, 12)
    third = cluster.add_node(num_cpus=2)
    wait_for_world(driver, changing / "run", 3, 12)
    cluster.remove_node(second, allow_graceful=False)
    cluster.remove_node(third, allow_graceful=False)
    wait_for_world(driver, changing / "run", 1, 12)
    cluster.add_node(num_cpus=2)
    wait_for_world(driver, changing / "run", 2, 12)
    stop(driver)
    after = runs.steps_of(changing / "run")
    assert list(after) == list(range(1, len(after) + 1))

    driver = start(drivers, data, quiet, cluster, 1)
    wait_for_world(driver, quiet / "run", 1, len(after))
    stop(driver)
    expected = runs.steps_of(quiet / "run")
    for step, line in after.items():
        assert line["num_tokens"] == expected[step]["num_tokens"], step
        assert line["num_selected"] == expected[step]["num_selected"], step
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=1e-6), step
