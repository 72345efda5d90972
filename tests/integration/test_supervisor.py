"""Failures that the driver survives or refuses, its messages, and commands that end in the middle."""

import os
import shutil
import signal

import pyarrow as pa
import pytest
import tinyruns as runs
from messages import says
from processes import until

from declutr.common.errors import TrainingFailedError
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, find_latest, steps_in
from declutr.trainer.driver.continuation import FAILURES, ended_early
from declutr.trainer.train import main, run_training

pytestmark = pytest.mark.ray


def test_a_run_whose_scores_get_no_better_ends_early_and_stays_ended(data, tmp_path, log):
    """Hardly any learning rate: all scores are those of the first step."""

    def config(patience):
        found = {
            "optim": {"lr": 1e-12},
            "steps": 40,
            "export": "best",
            "encoder": {"dropout": 0.0},
            "validation": {"every_steps": 1, "patience": patience},
            "checkpoint": {"every_steps": 1, "keep_last": 1},
            "scaling": {"num_workers": 0},
        }
        return runs.finished_config(data, tmp_path / "run", **found)

    def again(patience):
        summary = run_training(config(patience))
        steps = steps_in(tmp_path / "run" / "checkpoints")
        return summary["steps"], summary["ended"], summary["exported_step"], summary["patience"], summary["why"], steps

    *figures, why, steps = again(2)
    assert (figures, steps) == ([3, "early", 1, 2], [1, 3])
    says(why, "distant_recall_at_1", "step 1")
    says(why, "2 scores", "validation.patience = 2")
    assert any("step 3 of 40" in line for line in log)
    assert again(2) == again(1) == (*figures, why, steps)
    assert any("already stopped early" in line for line in log)
    assert list(runs.steps_of(tmp_path / "run")) == [1, 2, 3]
    assert not any("starting again" in line for line in log)
    for patience, ended in ((2, True), (3, False), (None, False)):
        assert (ended_early(tmp_path / "run", patience, 3) is not None) == ended, "more patience goes on"


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_an_error_that_comes_again_ends_the_run_with_the_workers_own_words(data, copied, tmp_path, log):
    """Shards altered behind their size and time, which only a full check sees: the same error, whoever tries."""
    for step in steps_in(copied / "checkpoints")[-1:]:
        (checkpoint_path(copied / "checkpoints", step) / "state.json").unlink()  # the last steps are to be done again
    altered = shutil.copytree(data, tmp_path / "altered")
    for path in altered.glob("train-*.arrow"):
        before, content = path.stat(), bytearray(path.read_bytes())
        whole = pa.py_buffer(bytes(content))
        reader = pa.ipc.open_file(whole)
        for number in range(reader.num_record_batches):
            windows = reader.get_batch(number).column("windows").buffers()[3]
            start = windows.address - whole.address
            content[start : start + windows.size] = b"\x7f" * windows.size
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    config = runs.finished_config(altered, copied, scaling={"max_repeated_failures": 2, "restart_backoff_seconds": 0.1})
    with pytest.raises(TrainingFailedError) as ended:
        run_training(config)
    message = str(ended.value)
    assert "worker 0: ShardError" in message
    says(message, "same failure", "2 times")
    assert len(message.splitlines()) == 2
    assert "Traceback" not in message
    account = (copied / FAILURES).read_text()
    assert account.count("=== ") == 2
    assert "Traceback" in account
    assert sum("starting again" in line for line in log) == 1
    assert not (copied / "lock.json").exists()


@pytest.mark.nightly
def test_a_command_that_is_told_to_stop_before_its_first_step_says_so(data, tmp_path):
    config = runs.write_config(tmp_path / "train.yaml", train=runs.train_values(data, tmp_path / "run"))
    driver, _ = runs.start_command("declutr.trainer.train", config, tmp_path / "run")
    until(lambda: (tmp_path / "run" / "lock.json").exists() or driver.poll() is not None, "its lock")
    everything = runs.descendants(driver.pid)
    os.kill(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGINT
    says(err, "SIGINT", "same command")
    assert "Traceback" not in err
    assert runs.wait_gone(everything) == {}
    assert not (tmp_path / "run" / "lock.json").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_a_loss_that_is_not_finite_ends_the_run_at_once(data, tmp_path, capsys):
    changes = {"optim": {"lr": 1e12}, "scaling": {"max_failures": 5}, "checkpoint": {"every_steps": 1}}
    values = runs.train_values(data, tmp_path / "run", **changes)
    assert main([str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    said = capsys.readouterr().err
    says(said, "step 2", "loss nan")
    says(said, "optim.lr", "1000000000000.0")
    assert "Traceback" not in said
    assert list(runs.steps_of(tmp_path / "run")) == [1]
    assert not (tmp_path / "run" / "export").exists()
    boards = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(boards) == 1, "the workers were started again"


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


@pytest.mark.slow
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


@pytest.mark.nightly
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
