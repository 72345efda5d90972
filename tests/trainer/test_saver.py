"""The writer beside the training: in order, patient, and honest about a storage that is full, read-only or silent."""

import threading
import time
from unittest.mock import Mock

import pytest
import torch
from diskcalls import killed_before_each
from messages import all_of, says
from processes import until
from tinyruns import state_of
from volumes import small_volume

from declutr.common.errors import SaveError
from declutr.trainer.checkpoints import checkpoint, saver
from declutr.trainer.checkpoints.saver import Job, Saver
from declutr.trainer.checkpoints.state import CheckpointConfig

MIB = 2**20


@pytest.fixture
def volume(tmp_path):
    with small_volume(tmp_path / "small", 6) as mounted:
        (mounted.path / "run").mkdir()
        yield mounted


@pytest.fixture
def opened():
    """Makes savers that are closed at the end."""
    savers = []

    def make(folder, before=lambda: None, after=None, clock=time.monotonic, **config):
        savers.append(Saver(folder, CheckpointConfig(**config), "mrr", before, after, clock))
        return savers[-1]

    yield make
    for opened_saver in savers:
        opened_saver.close()


def give(one, step, mib=1.0, wait=False):
    contents = {"encoder.safetensors": {"weight": torch.full((int(mib * MIB / 4),), float(step))}}
    one.reuse_memory()
    one.submit(state_of(step), contents)
    if wait:
        one.wait()


def test_checkpoints_are_written_verified_and_pruned(tmp_path, opened):
    one = opened(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2, 3, 4):
        give(one, step)
    one.wait()
    assert checkpoint.steps_in(one.folder) == [3, 4]
    assert checkpoint.find_latest(one.folder)[1].sizes["encoder.safetensors"] > MIB
    assert not one.failed()
    assert one.reuse_memory()["encoder.safetensors"]["weight"][0] == 4  # the memory comes back


def test_a_full_disk_is_waited_out(volume, opened, log):
    one = opened(volume.path / "run" / "checkpoints", keep_last=1)
    give(one, 1, wait=True)
    volume.fill(leave_bytes=MIB // 2)
    give(one, 2)
    until(lambda: log, "a message")
    says(log[0], "step 2", "cannot be written", "No space left on device", "1.0 MiB", "0.5 MiB")
    assert checkpoint.find_latest(one.folder)[1].step == 1
    until(lambda: not list(one.folder.glob(".*")), "the end of half a checkpoint")
    give(one, 3)  # takes the place of the one that could not be written
    volume.drain()
    one.wait()
    assert checkpoint.steps_in(one.folder) == [3]
    assert len([line for line in log if "cannot be written" in line]) == 1
    says(log[-1], "step 3", "written")


def test_remains_of_a_killed_writer_make_room_for_the_next_checkpoint(volume, opened):
    """Nothing else would delete them: every save would fail, and so would those of the repeated command."""
    one = opened(volume.path / "run" / "checkpoints", storage_retry_seconds=0.1)
    left_behind = one.folder / ".step-00000005.77.tmp"
    left_behind.mkdir(parents=True)
    (left_behind / "encoder.safetensors").write_bytes(bytes(4 * MIB))
    give(one, 1, mib=3, wait=True)
    assert checkpoint.steps_in(one.folder) == [1]
    assert not left_behind.exists()


@pytest.mark.parametrize(("fault", "words"), [("full", "No space left on device"), ("ro", "Read-only file system")])
def test_patience_ends_with_one_reason(volume, opened, fault, words):
    now = [0.0]
    one = opened(volume.path / "run" / "checkpoints", clock=lambda: now[0], storage_retry_seconds=0.7)
    give(one, 1, wait=True)
    if fault == "full":
        volume.fill()
    else:
        volume.read_only(True)
    give(one, 2)
    until(lambda: one._pausing, "a first failure")
    now[0] = 1.0
    facts = "step 2", one.folder, words, "1.0 MiB", "checkpoint.storage_retry_seconds"
    try:
        for call in (one.wait, one.reuse_memory):
            with pytest.raises(SaveError, match=all_of(facts)):
                call()
        assert one.failed()
        assert checkpoint.find_latest(one.folder)[1].step == 1
    finally:
        if fault == "ro":
            volume.read_only(False)


def test_saver_writes_what_a_checkpoint_needs_first_and_the_checkpoint_once(tmp_path, opened, log):
    """`before` fails twice: no checkpoint until it has done its work. Then `after` fails, and only it is repeated."""
    before, after = [], []

    def fails_twice():
        before.append(checkpoint.steps_in(tmp_path))
        if len(before) < 3:
            raise OSError(5, "Input/output error")

    def fails_first(step):
        after.append((step, checkpoint.steps_in(tmp_path)))
        if len(after) < 2:
            raise OSError(5, "Input/output error")

    give(opened(tmp_path, fails_twice, fails_first), 1, wait=True)
    assert (before, after) == ([[], [], []], [(1, [1])] * 2)
    assert len([line for line in log if "Input/output error" in line]) == 1


def test_a_storage_that_hangs_is_left_out_and_given_up(tmp_path, opened, monkeypatch, log):
    monkeypatch.setattr(saver, "_UNHURRIED_SECONDS", 0.05)
    begun, go, now = threading.Event(), threading.Event(), [0.0]
    config = {"every_steps": 2, "every_seconds": 60, "storage_retry_seconds": 100}
    one = opened(tmp_path, before=lambda: (begun.set(), go.wait()), clock=lambda: now[0], **config)
    give(one, 2)
    assert begun.wait(60)
    assert [one.due(step) for step in (4, 6)] == [False, False]
    (line,) = log
    says(line, "step 4", "still")
    now[0] = 99
    assert [one.due(7), one.failed()] == [False, False]
    now[0] = 101
    assert one.failed()
    with pytest.raises(SaveError, match=all_of("checkpoint", "101 s")):
        one.wait()
    go.set()


def test_checkpoint_is_due_by_steps_and_by_the_clock(tmp_path, opened):
    now = [0.0]
    one = opened(tmp_path, clock=lambda: now[0], every_steps=None, every_seconds=60)
    for step in range(1, 200):
        now[0] += 7.5
        assert one.due(step) == (step % 8 == 0), step
        if step % 8 == 0:
            give(one, step, mib=0.01, wait=True)
    by_steps = opened(tmp_path / "b", clock=lambda: now[0], every_steps=5, every_seconds=None)
    assert [step for step in range(1, 12) if by_steps.due(step)] == [5, 10]
    assert by_steps.due(11, needed=True)
    milestones = opened(tmp_path / "c", clock=lambda: now[0], every_steps=5, keep_every_steps=3)
    assert [step for step in range(1, 12) if milestones.due(step)] == [3, 5, 6, 9, 10]


def test_an_error_that_is_no_storage_is_raised_in_the_training(tmp_path, opened):
    one = opened(tmp_path)
    one.submit(state_of(1), {"encoder.safetensors": {"weight": torch.zeros(3, dtype=torch.complex64)}})
    with pytest.raises(KeyError, match="complex64"):
        one.wait()


DISCARD = """
from declutr.trainer.checkpoints.checkpoint import checkpoint_path, discard
def prepare(here):
    path = checkpoint_path(here, 7)
    path.mkdir()
    for name in ("encoder.safetensors", "state.json"):
        (path / name).write_text("whole")
def act(here): discard(checkpoint_path(here, 7))
"""


def test_a_kill_while_a_checkpoint_is_deleted_leaves_it_whole_or_gone(tmp_path):
    found = [sorted(path.name for path in here.glob("step-*/*")) for here in killed_before_each(DISCARD, tmp_path)]
    assert found == [["encoder.safetensors", "state.json"], [], [], []]


def test_a_copy_that_is_given_while_another_is_written_is_written_too(tmp_path, opened):
    begun, go = threading.Event(), threading.Event()
    one = opened(tmp_path, before=lambda: (begun.set(), go.wait()), keep_last=3)
    give(one, 1, mib=0.01)
    assert begun.wait(60)
    one.submit(state_of(2), {"encoder.safetensors": {"weight": torch.ones(3)}})
    go.set()
    one.close()
    assert checkpoint.steps_in(tmp_path) == [1, 2], "closing finishes what was given"


def test_memory_that_was_handed_back_is_not_written(tmp_path, opened):
    """The pause of half a second ends while the training takes the memory of a copy that waits for a retry."""
    before = Mock(side_effect=OSError(5, "Input/output error"))
    one = opened(tmp_path, before)
    give(one, 1, mib=0.01)
    until(lambda: one._pausing, "a pause")
    check = one.check
    one.check = lambda: (time.sleep(0.8), check())
    assert one.reuse_memory() is not None
    one.check = check
    assert not one._busy()
    before.assert_called_once()


def test_patience_begins_again_after_a_success(tmp_path, opened, log):
    now = [0.0]
    one = opened(tmp_path / "checkpoints", clock=lambda: now[0], storage_retry_seconds=10.0)
    weights = {"encoder.safetensors": {"weight": torch.zeros(5 * 2**18)}}
    job, error = Job(state_of(1), weights), OSError(5, "Input/output error")
    for now[0], pause in ((0.0, 0.5), (4.0, 1.0), (8.0, 2.0)):
        assert one._pause_after(job, error) == pause
    says(log[0], "5.0 MiB")
    now[0] = 9.0
    one._done(job)
    says(log[-1], "step 1", "4 attempts", "9 s")
    now[0] = 18.5  # later than the first failure by more than the patience
    assert one._pause_after(job, error) == 0.5
    assert len([line for line in log if "Training continues" in line]) == 2, "the same error again is no news"
    says(log[-1], "retrying", "10 s")
    now[0] = 28.5
    assert one._pause_after(job, error) is None
