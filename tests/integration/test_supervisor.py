"""Failures that the driver survives or refuses, and its messages."""

import os
import shutil
import signal

import pyarrow as pa
import pytest
import ray
import tinyruns as runs
import torch
from messages import all_of, says
from safetensors.torch import load_file
from tiny import declutr

from declutr.common.config import ConfigError
from declutr.common.lock import RunLock, RunLockedError
from declutr.common.storage import hash_file, read_json, write_json
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, read_state, steps_in
from declutr.trainer.checkpoints.tensorfile import write_tensors
from declutr.trainer.driver.failure import TrainingFailedError
from declutr.trainer.driver.fork import FORK, fork
from declutr.trainer.driver.run import run_training
from declutr.trainer.driver.summary import FAILURES, ended_early
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.train import main

pytestmark = pytest.mark.ray


def test_a_run_that_another_command_works_on_is_left_alone(data, copied):
    before = {path: hash_file(path) for path in copied.rglob("*") if path.is_file()}
    with RunLock(copied, lambda: None), pytest.raises(RunLockedError, match=f"pid {os.getpid()}"):
        run_training(runs.finished_config(data, copied))
    assert {path: hash_file(path) for path in copied.rglob("*") if path.is_file()} == before
    assert not ray.is_initialized()


@pytest.mark.parametrize(("queue_size", "carried"), [(24, True), (32, True), (23, False), (0, False)])
def test_a_fork_carries_the_queue_where_there_is_room_for_it(data, copied, tmp_path, queue_size, carried):
    old = checkpoint_path(copied / "checkpoints", 8)
    state = read_json(old / "state.json")
    (old / "objective.safetensors").unlink()
    queue = {"queue": torch.ones(24, 32)}
    state["files"]["objective.safetensors"] = write_tensors(old / "objective.safetensors", queue)
    state["sizes"]["objective.safetensors"] = (old / "objective.safetensors").stat().st_size
    write_json(old / "state.json", state)
    fork(runs.finished_config(data, copied, objective={"queue_size": queue_size}, steps=10), str(tmp_path / "new"))
    path = checkpoint_path(tmp_path / "new" / "checkpoints", 8)
    assert read_state(path).step == 8  # its checksums hold
    objective = declutr(DeclutrConfig(queue_size=queue_size))
    objective.restore(load_file(path / "objective.safetensors"))
    assert (objective.queue is not None) == carried


def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(data, copied, tmp_path):
    wider = {"from_config": {**runs.FROM_CONFIG, "intermediate_size": 64}}
    for changes, message in (
        ({"encoder": wider, "steps": 10}, ("shapes", ".intermediate.", "[48, 32]", "[64, 32]")),
        ({"optim": {"lr": 0.1}}, ("step 8", "ends at 8")),
        ({"spans": {"max_tokens": 17}}, "spans.max_tokens = 17"),
    ):
        with pytest.raises(ConfigError, match=all_of(message)):
            fork(runs.finished_config(data, copied, **changes), str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=all_of("exists already", "fork")):
        fork(runs.finished_config(data, copied), str(copied))


def test_a_fork_begins_where_the_other_run_is_with_another_configuration(data, finished, copied, tmp_path):
    local = {"num_workers": 0}
    changed = runs.finished_config(data, copied, optim={"lr": 0.0005}, steps=10, batch_documents=4, scaling=local)
    with pytest.raises(
        ConfigError,
        match=all_of(
            "batch_documents was 8", "optim.lr was 0.001", "now 0.0005", "steps was 8", "now 10", "--fork NEW_RUN"
        ),
    ):
        run_training(changed)
    new = tmp_path / "new"
    forked = fork(changed, str(new))
    assert forked == changed.model_copy(update={"run": str(new)})
    old = checkpoint_path(finished / "run" / "checkpoints", 8)
    path = checkpoint_path(new / "checkpoints", 8)
    assert read_state(path).config_hash == changed.hash() != read_state(old).config_hash
    assert read_state(old).scores
    assert read_state(path).scores == {}, "its validations may differ"
    for name in ("encoder", "optimizer", "objective"):
        assert hash_file(path / f"{name}.safetensors") == hash_file(old / f"{name}.safetensors")
    record = read_json(new / FORK)
    _, rate, steps = record["changed"]
    says(rate, "optim.lr", "was 0.001", "now 0.0005")
    says(steps, "steps", "was 8", "now 10")
    assert record["step"] == 8
    run_training(forked)
    after = runs.steps_of(new)
    assert list(after) == list(range(1, 11))
    assert [read_state(checkpoint_path(new / "checkpoints", step)).documents for step in (8, 10)] == [64, 72]
    assert {step: after[step] for step in range(1, 9)} == runs.steps_of(finished / "run")
    assert fork(changed, str(new)) == forked  # the same command continues
    assert steps_in(copied / "checkpoints") == steps_in(finished / "run" / "checkpoints")


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


def test_a_command_that_is_told_to_stop_before_its_first_step_says_so(data, tmp_path):
    config = runs.write_config(tmp_path / "train.yaml", train=runs.train_values(data, tmp_path / "run"))
    driver, _ = runs.start_command("declutr.trainer.train", config, tmp_path / "run")
    while not (tmp_path / "run" / "lock.json").exists():
        assert driver.poll() is None, driver.communicate()
    everything = runs.descendants(driver.pid)
    os.kill(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=100)
    assert driver.returncode == 128 + signal.SIGINT
    says(err, "SIGINT", "same command")
    assert "Traceback" not in err
    assert runs.wait_gone(everything) == {}
    assert not (tmp_path / "run" / "lock.json").exists()


def test_problems_are_said_although_ray_has_begun_to_start(data, tmp_path, capsys):
    values = runs.train_values(data, tmp_path / "run", batch_documents=10**6, spans={"max_tokens": 17})
    assert main([str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in said
    assert "batch_documents = 1000000" in said
    assert "spans.max_tokens = 17" in said
    assert not ray.is_initialized()
