"""Failures that the driver survives or refuses, commands that end in the middle, and where a run continues."""

import os
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pytest
import tinyruns as runs
from broken import flip_a_bit
from messages import says
from processes import until
from tinyruns import problems

from declutr.common.errors import TrainingFailedError
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, find_latest, read_state, steps_in
from declutr.trainer.driver.continuation import FAILURES, ended_early
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.train import main, run_training, train

pytestmark = pytest.mark.ray


def newest(run):
    return checkpoint_path(run / "checkpoints", steps_in(run / "checkpoints")[-1])


def test_a_run_whose_scores_get_no_better_ends_early_and_stays_ended(data, tmp_path, log):
    """Hardly any learning rate: all scores are those of the first step."""
    changes = {"optim": {"lr": 1e-12}, "steps": 40, "export": "best", "encoder": {"dropout": 0.0}}
    changes |= {"checkpoint": {"every_steps": 1, "keep_last": 1}, "scaling": {"num_workers": 0}}

    def again(patience):
        validation = {"every_steps": 1, "patience": patience}
        summary = run_training(runs.finished_config(data, tmp_path / "run", **changes, validation=validation))
        figures = [summary[name] for name in ("steps", "ended", "exported_step", "patience")]
        return figures, summary["why"], steps_in(tmp_path / "run" / "checkpoints")

    figures, why, steps = again(2)
    assert (figures, steps) == ([3, "early", 1, 2], [1, 3])
    says(why, "distant_recall_at_1", "step 1")
    says(why, "2 scores", "validation.patience = 2")
    assert any("step 3 of 40" in line for line in log)
    assert again(2) == again(1) == (figures, why, steps)
    assert any("already stopped early" in line for line in log)
    assert list(runs.steps_of(tmp_path / "run")) == [1, 2, 3]
    assert not any("starting again" in line for line in log)
    for patience, ended in ((2, True), (3, False), (None, False)):
        assert (ended_early(tmp_path / "run", patience, 3) is not None) == ended, "more patience goes on"


@pytest.mark.nightly
@pytest.mark.usefixtures("session")
def test_an_error_that_comes_again_ends_the_run_with_the_workers_own_words(data, copied, tmp_path, log):
    """Shards altered behind their size and time, which only a full check sees: the same error, whoever tries."""
    (newest(copied) / "state.json").unlink()  # the last steps are to be done again
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
    message, account = str(ended.value), (copied / FAILURES).read_text()
    says(message, "same failure", "2 times")
    assert "worker 0: ShardError" in message
    assert len(message.splitlines()) == 2
    assert ["Traceback" in text for text in (message, account)] == [False, True]
    assert account.count("=== ") == 2
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
    errors = capsys.readouterr().err
    says(errors, "step 2", "loss nan")
    says(errors, "optim.lr", "1000000000000.0")
    assert "Traceback" not in errors
    assert list(runs.steps_of(tmp_path / "run")) == [1]
    assert not (tmp_path / "run" / "export").exists()
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1, "the workers were started again"


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
    validation = {"every_steps": 4, "stsb": "sts"}
    config = runs.finished_config(data, "run", validation=validation, scaling={"num_workers": 0})
    assert run_training(config)["steps"] == 8
    times = [line["time"] for line in read_metrics(Path("run")) if line["kind"] == "step"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    shutil.rmtree(newest(Path("run")))
    Path("run/summary.json").unlink()
    assert run_training(config)["steps"] == 8
    assert [line["time"] for line in read_metrics(Path("run")) if line["kind"] == "step"][:6] == times[:6]


@pytest.fixture
def under_way(data, tmp_path, request):
    """A run that has taken some steps: driver, everything below it, folder. Its parameter is shutdown_grace_seconds."""
    run = tmp_path / "run"
    values = runs.train_values(data, run, steps=100_000, scaling={"shutdown_grace_seconds": request.param})
    config = runs.write_config(tmp_path / "train.yaml", train=values)
    driver, before = runs.start_command("declutr.trainer.train", config, run)
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
    out, errors = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGTERM
    step = find_latest(run / "checkpoints")[1].step
    says(errors, "SIGTERM", "saving", "90 s", "second signal")
    says(errors, f"step {step} of 100000", "SIGTERM", "same command")
    assert "Traceback" not in out + errors
    assert "\r" not in errors, "a bar in a file"
    assert runs.wait_gone(everything) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("under_way", [5], indirect=True)
def test_a_renamed_folder_ends_the_run_and_is_not_made_anew(under_way):
    driver, everything, run = under_way
    run.rename(run.with_name("moved"))
    out, errors = driver.communicate(timeout=100)
    assert driver.returncode == 1
    says(errors, run, "renamed")
    assert "Traceback" not in out + errors
    assert not run.exists()
    assert runs.wait_gone(everything) == {}
