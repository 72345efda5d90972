"""Checkpoints: which are kept and which is the best, the bytes of their files, and the writer beside the training."""

import resource
import shutil
import signal
import threading
import time
from unittest.mock import Mock

import pytest
import torch
import xxhash
from broken import flip_a_bit, remove, truncate
from diskcalls import killed_before_each
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of, says
from processes import until
from safetensors.torch import load_file, save
from tinyruns import state_of
from volumes import small_volume

from declutr.common.errors import CheckpointError, SaveError, UnreadableError
from declutr.trainer.checkpoints import checkpoint, saver
from declutr.trainer.checkpoints.checkpoint import early_end, find_best, from_best, history, kept
from declutr.trainer.checkpoints.saver import Job, Saver, write_tensors
from declutr.trainer.checkpoints.state import CheckpointConfig, RunState
from declutr.trainer.metrics.metrics import MetricsWriter


@st.composite
def configs(draw):
    every, times = draw(st.integers(1, 6)), draw(st.none() | st.integers(1, 4))
    return CheckpointConfig(
        every_steps=every, keep_last=draw(st.integers(1, 5)), keep_every_steps=times and every * times
    )


@given(st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 1), max_size=20), configs())
def test_laws_of_what_is_kept(scores, config):
    reasons = kept(scores, config)
    assert list(reasons) == sorted(reasons.keys() & scores.keys())
    assert all(reasons.values())
    last, best, every = ([step for step in reasons if why in reasons[step]] for why in ("last", "best", "every"))
    assert last == sorted(scores)[-config.keep_last :]
    ranks = [(-score, step) for step, score in scores.items() if score is not None]
    assert best == [step for _, step in sorted(ranks)[:1]]
    interval = config.keep_every_steps
    assert every == [step for step in sorted(scores) if interval and step % interval == 0]
    assert kept({step: scores[step] for step in reasons}, config) == reasons  # looking twice deletes nothing more
    alive = {}
    for step in sorted(scores):
        alive[step] = scores[step]
        alive = {step: alive[step] for step in kept(alive, config)}
        assert step in alive, "the newest one was deleted"
    assert alive.keys() == reasons.keys(), "pruning after every checkpoint ends where pruning once does"


def write(folder, step, **scores):
    names = [f"{name}.safetensors" for name in ("encoder", "optimizer", "objective")]
    contents = {name: {"weight": torch.full((40,), float(step))} for name in names}
    return checkpoint.save(folder, state_of(step, **scores), contents)


def test_broken_ones_neither_count_nor_stay_and_old_ones_have_no_sizes(tmp_path):
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        path = write(tmp_path, step, mrr=score)
    state = checkpoint.read_state(path)
    assert state.sizes == {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    fields = state.model_dump(exclude={"sizes", "skipped", "skipped_in_a_row"})
    assert RunState.model_validate(fields).sizes == {}
    truncate(checkpoint.checkpoint_path(tmp_path, 4) / "encoder.safetensors")
    (tmp_path / "step-00000003" / "state.json").unlink()
    write(tmp_path, 6)
    checkpoint.prune(tmp_path, CheckpointConfig(keep_last=2), "mrr", 6)
    assert checkpoint.steps_in(tmp_path) == [1, 2, 6]


def test_a_checkpoint_beyond_the_newest_never_displaces_it(tmp_path):
    """Step 8 was passed over, the run went on from 6 and saved 7: keep_last = 1 must not mean 8, whole or broken."""
    for step in (6, 7, 8):
        write(tmp_path, step)
    for steps in ([7, 8], [7]):
        checkpoint.prune(tmp_path, CheckpointConfig(keep_last=1), "mrr", 7)
        assert (checkpoint.steps_in(tmp_path), checkpoint.find_latest(tmp_path)[1].step) == (steps, steps[-1])
        (checkpoint.checkpoint_path(tmp_path, steps[-1]) / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        (truncate, "encoder.safetensors", ("truncated", "altered")),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "encoder.safetensors", ("truncated", "altered")),
        (flip_a_bit, "optimizer.safetensors", ("truncated", "altered")),
        (remove, "objective.safetensors", "missing"),
        (remove, "state.json", ("missing", "unreadable")),
        (truncate, "state.json", ("missing", "unreadable")),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, log, damage, name, message):
    """Without the checksums a file of the right length is whole."""
    older, path = (write(tmp_path, step) for step in (4, 6))
    damage(path / name)
    for verify in (True, False):
        if not verify and damage is flip_a_bit:
            assert checkpoint.read_state(path, verify=False).step == 6
        else:
            with pytest.raises(CheckpointError, match=all_of(name, message)):
                checkpoint.read_state(path, verify=verify)
    assert checkpoint.find_latest(tmp_path) == (older, checkpoint.read_state(older))
    (line,) = log
    says(line, name, message, "step-00000006")


def test_unreadable_checkpoint_is_not_a_broken_one(tmp_path, log):
    """A storage that fails: an older checkpoint is taken if there is one, but nothing begins at step 0."""
    write(tmp_path, 4)
    newest = write(tmp_path, 6) / "state.json"
    newest.unlink()
    newest.mkdir()
    assert checkpoint.find_latest(tmp_path)[1].step == 4
    says(log[0], "state.json", "Is a directory")
    shutil.rmtree(tmp_path / "step-00000004")
    with pytest.raises(UnreadableError, match="cannot be read"):
        checkpoint.find_latest(tmp_path)
    checkpoint.prune(tmp_path, CheckpointConfig(keep_last=1), "mrr", 6)
    assert checkpoint.steps_in(tmp_path) == [6], "it may be whole"
    with pytest.raises(NotADirectoryError):
        checkpoint.find_latest(write(tmp_path, 8) / "state.json")


@given(st.dictionaries(st.integers(1, 50), st.integers(0, 4).map(float), min_size=1, max_size=12))
def test_laws_of_a_best_score(scores):
    assert early_end({}, "mrr", 1) is None
    best = from_best(scores)[0]
    assert scores[best] == max(scores.values())
    assert all(score < scores[best] for step, score in scores.items() if step < best)
    since = len([step for step in scores if step > best])
    assert early_end(scores, "mrr", since + 1) is None
    reason = early_end(scores, "mrr", since)
    says(reason, f"step {best}", f"none of the {since} scores", f"validation.patience = {since}")


def test_lines_and_checkpoints_without_a_score_and_the_untrained_weights_do_not_count(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step, scores in ((6, {"mrr": 0.9}), (8, {"mrr": 0.1, "distant_mrr": 0.2})):
        writer.add("validation", step, scores)
        checkpoint.save(tmp_path / "checkpoints", state_of(step, **scores), {"encoder.safetensors": {}})
    writer.add("validation", 0, {"mrr": 0.7})  # of the untrained weights
    writer.close()
    assert (history(tmp_path, "mrr", 7), history(tmp_path / "nothing", "mrr", 7)) == ({6: 0.9}, {})
    for score, best, lines in (("distant_mrr", 8, {8: 0.2}), ("mrr", 6, {6: 0.9, 8: 0.1})):
        assert history(tmp_path, score, 8) == lines
        assert find_best(tmp_path / "checkpoints", score)[1].step == best


def test_a_broken_best_is_named_and_the_next_is_taken(tmp_path, log):
    for step, score in ((2, 0.5), (4, 0.9), (6, 0.7), (8, 0.1)):
        write(tmp_path, step, mrr=score)
    for step, name, best in ((4, "encoder.safetensors", 6), (6, "state.json", 2)):
        truncate(checkpoint.checkpoint_path(tmp_path, step) / name)
        assert find_best(tmp_path, "mrr")[1].step == best
        says(log, "skipping a broken checkpoint", f"step-0000000{step}")


DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
TENSORS = {f"ümlaut {name}": torch.arange(13).to(getattr(torch, name)) for name in DTYPES}
TENSORS |= {"of many": torch.arange(5000.0).reshape(50, 100), "a step": torch.tensor(3.0), "none": torch.empty(0, 4)}


@pytest.mark.parametrize("chunk_bytes", [64, 2**20])
def test_the_bytes_are_those_of_the_library(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(saver, "_CHUNK_BYTES", chunk_bytes)
    path = tmp_path / "it.safetensors"
    checksum = write_tensors(path, TENSORS)
    assert path.read_bytes() == save(TENSORS)
    assert checksum == f"xxh3:{xxhash.xxh3_128(path.read_bytes()).hexdigest()}"
    write_tensors(tmp_path / "nothing", {})
    assert load_file(tmp_path / "nothing") == {}


def test_a_limit_on_files_is_an_error_with_its_number(tmp_path):
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path / "it", TENSORS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


MIB = 2**20


@pytest.fixture
def volume(tmp_path):
    with small_volume(tmp_path / "small", 6) as mounted:
        yield mounted


@pytest.fixture
def opened():
    savers = []

    def make(folder, before=lambda: None, after=None, clock=time.monotonic, **config):
        savers.append(Saver(folder, CheckpointConfig(**config), "mrr", before, after, clock))
        return savers[-1]

    yield make
    for opened_saver in savers:
        opened_saver.close()


def give(writer, step, mib=1.0, wait=False):
    writer.reuse_memory()
    writer.submit(state_of(step), {"encoder.safetensors": {"weight": torch.full((int(mib * MIB / 4),), float(step))}})
    if wait:
        writer.wait()


def test_checkpoints_are_written_verified_and_pruned(tmp_path, opened):
    writer = opened(tmp_path / "checkpoints", keep_last=2)
    for step in (1, 2, 3, 4):
        give(writer, step)
    writer.wait()
    assert checkpoint.steps_in(writer.folder) == [3, 4]
    assert checkpoint.find_latest(writer.folder)[1].sizes["encoder.safetensors"] > MIB
    assert not writer.failed()
    assert writer.reuse_memory()["encoder.safetensors"]["weight"][0] == 4  # the memory comes back
    writer.submit(state_of(5), {"encoder.safetensors": {"weight": torch.zeros(3, dtype=torch.complex64)}})
    with pytest.raises(KeyError, match="complex64"):  # an error that is no storage is raised in the training
        writer.wait()


def test_a_full_disk_is_waited_out(volume, opened, log):
    writer = opened(volume.path / "checkpoints", keep_last=1)
    give(writer, 1, wait=True)
    volume.fill(leave_bytes=MIB // 2)
    give(writer, 2)
    until(lambda: log, "a message")
    says(log[0], "step 2", "cannot be written", "No space left on device", "1.0 MiB", "0.5 MiB")
    assert checkpoint.find_latest(writer.folder)[1].step == 1
    until(lambda: not list(writer.folder.glob(".*")), "the end of half a checkpoint")
    give(writer, 3)  # takes the place of the one that could not be written
    volume.drain()
    writer.wait()
    assert checkpoint.steps_in(writer.folder) == [3]
    assert len([line for line in log if "cannot be written" in line]) == 1
    says(log[-1], "step 3", "written")


def test_remains_of_a_killed_writer_make_room_for_the_next_checkpoint(volume, opened):
    """Nothing else would delete them: every save would fail, and so would those of the repeated command."""
    writer = opened(volume.path / "checkpoints", storage_retry_seconds=0.1)
    left_behind = writer.folder / ".step-00000005.77.tmp"
    left_behind.mkdir(parents=True)
    (left_behind / "encoder.safetensors").write_bytes(bytes(4 * MIB))
    give(writer, 1, mib=3, wait=True)
    assert checkpoint.steps_in(writer.folder) == [1]
    assert not left_behind.exists()


@pytest.mark.parametrize(("fault", "words"), [("full", "No space left on device"), ("ro", "Read-only file system")])
def test_patience_ends_with_one_reason(volume, opened, fault, words):
    now = [0.0]
    writer = opened(volume.path / "checkpoints", clock=lambda: now[0], storage_retry_seconds=0.7)
    give(writer, 1, wait=True)
    if fault == "full":
        volume.fill()
    else:
        volume.read_only(True)
    give(writer, 2)
    until(lambda: writer._pausing, "a first failure")
    now[0] = 1.0
    facts = "step 2", writer.folder, words, "1.0 MiB", "checkpoint.storage_retry_seconds"
    try:
        for call in (writer.wait, writer.reuse_memory):
            with pytest.raises(SaveError, match=all_of(facts)):
                call()
        assert writer.failed()
        assert checkpoint.find_latest(writer.folder)[1].step == 1
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


def test_a_storage_that_hangs_is_left_out_and_given_up_and_a_slow_one_awaited(tmp_path, opened, monkeypatch, log):
    monkeypatch.setattr(saver, "_UNHURRIED_SECONDS", 0.05)
    begun, go, now = threading.Event(), threading.Event(), [0.0]
    config = {"every_steps": 2, "every_seconds": 60, "storage_retry_seconds": 100}
    writer = opened(tmp_path, before=lambda: (begun.set(), go.wait()), clock=lambda: now[0], **config)
    give(writer, 2)
    assert begun.wait(60)
    assert [writer.due(step) for step in (4, 6)] == [False, False]
    (line,) = log
    says(line, "step 4", "still")
    now[0] = 99
    assert [writer.due(7), writer.failed()] == [False, False]
    now[0] = 101
    assert [writer.due(8, needed=True), writer.failed()] == [False, True]
    with pytest.raises(SaveError, match=all_of("checkpoint", "101 s")):
        writer.wait()
    slow = opened(tmp_path / "slow", before=lambda: go.wait(0.5))
    give(slow, 2, mib=0.01)
    assert slow.due(5, needed=True), "it waits longer than one that is due by its step"
    go.set()


def test_checkpoint_is_due_by_steps_and_by_the_clock(tmp_path, opened):
    now = [0.0]
    writer = opened(tmp_path, clock=lambda: now[0], every_steps=None, every_seconds=60)
    for step in range(1, 200):
        now[0] += 7.5
        assert writer.due(step) == (step % 8 == 0), step
        if step % 8 == 0:
            give(writer, step, mib=0.01, wait=True)
    by_steps = opened(tmp_path / "b", clock=lambda: now[0], every_steps=5, every_seconds=None)
    assert [step for step in range(1, 12) if by_steps.due(step)] == [5, 10]
    assert by_steps.due(11, needed=True)
    milestones = opened(tmp_path / "c", clock=lambda: now[0], every_steps=5, keep_every_steps=3)
    assert [step for step in range(1, 12) if milestones.due(step)] == [3, 5, 6, 9, 10]


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
    writer = opened(tmp_path, before=lambda: (begun.set(), go.wait()), keep_last=3)
    give(writer, 1, mib=0.01)
    assert begun.wait(60)
    writer.submit(state_of(2), {"encoder.safetensors": {"weight": torch.ones(3)}})
    go.set()
    writer.close()
    assert checkpoint.steps_in(tmp_path) == [1, 2], "closing finishes what was given"


def test_memory_that_was_handed_back_is_not_written(tmp_path, opened):
    """The pause of half a second ends while the training takes the memory of a copy that waits for a retry."""
    before = Mock(side_effect=OSError(5, "Input/output error"))
    writer = opened(tmp_path, before)
    give(writer, 1, mib=0.01)
    until(lambda: writer._pausing, "a pause")
    check = writer.check
    writer.check = lambda: (time.sleep(0.8), check())
    assert writer.reuse_memory() is not None
    writer.check = check
    assert not writer._busy()
    before.assert_called_once()


def test_patience_begins_again_after_a_success(tmp_path, opened, log):
    now = [0.0]
    writer = opened(tmp_path / "checkpoints", clock=lambda: now[0], storage_retry_seconds=10.0)
    job = Job(state_of(1), {"encoder.safetensors": {"weight": torch.zeros(5 * 2**18)}})
    error = OSError(5, "Input/output error")
    for now[0], pause in ((0.0, 0.5), (4.0, 1.0), (8.0, 2.0)):
        assert writer._pause_after(job, error) == pause
    says(log[0], "5.0 MiB")
    now[0] = 9.0
    writer._done(job)
    says(log[-1], "step 1", "4 attempts", "9 s")
    now[0] = 18.5  # later than the first failure by more than the patience
    assert writer._pause_after(job, error) == 0.5
    assert len([line for line in log if "Training continues" in line]) == 2, "the same error again is no news"
    says(log[-1], "retrying", "10 s")
    now[0] = 28.5
    assert writer._pause_after(job, error) is None
