"""Real commands that end in the middle: signals to the process group, a folder that is renamed."""

import os
import signal

import pytest
import tinyruns as runs
from messages import says

from declutr.trainer.checkpoints.checkpoint import find_latest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def under_way(data, tmp_path, request):
    """A run that has taken some steps: driver, everything below it, folder. Its parameter is shutdown_grace_seconds."""
    run = tmp_path / "run"
    values = runs.train_values(data, run, steps=100_000, scaling={"shutdown_grace_seconds": request.param})
    driver, before = runs.start_command(
        "declutr.trainer.train", runs.write_config(tmp_path / "train.yaml", train=values), run
    )
    runs.wait_for_step(driver, before, run, 3, timeout=150)
    return driver, runs.descendants(driver.pid), run


@pytest.mark.parametrize("under_way", [90], indirect=True)
def test_signal_to_the_process_group_saves_and_leaves_nothing(under_way):
    """As `timeout` does: twice to the command and once more to all processes of its group."""
    driver, everything, run = under_way
    for _ in range(2):
        os.kill(driver.pid, signal.SIGTERM)
    os.killpg(driver.pid, signal.SIGTERM)
    out, said = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGTERM
    step = find_latest(run / "checkpoints")[1].step
    says(said, "SIGTERM", "saving", "90 s", "second signal")
    says(said, f"step {step} of 100000", "SIGTERM", "same command")
    assert "Traceback" not in out + said
    assert "\r" not in said, "a bar in a file"
    assert runs.wait_gone(everything) == {}


@pytest.mark.parametrize("under_way", [5], indirect=True)
def test_a_renamed_folder_ends_the_run_and_is_not_made_anew(under_way):
    driver, everything, run = under_way
    run.rename(run.with_name("moved"))
    out, said = driver.communicate(timeout=100)
    assert driver.returncode == 1
    says(said, run, "renamed")
    assert "Traceback" not in out + said
    assert not run.exists()
    assert runs.wait_gone(everything) == {}
