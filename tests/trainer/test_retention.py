"""Which checkpoints are kept and which is the best: laws, and real files; the bytes of a file of tensors."""

import resource
import shutil
import signal

import pytest
import torch
import xxhash
from broken import flip_a_bit, remove, truncate
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of, says
from safetensors.torch import load_file, save
from tinyruns import state_of

from declutr.common.errors import CheckpointError, UnreadableError
from declutr.trainer.checkpoints import checkpoint, saver
from declutr.trainer.checkpoints.checkpoint import early_end, find_best, from_best, history, kept
from declutr.trainer.checkpoints.saver import write_tensors
from declutr.trainer.checkpoints.state import CheckpointConfig, RunState
from declutr.trainer.metrics.metrics import MetricsWriter

HISTORIES = st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 1), max_size=20)


@st.composite
def configs(draw):
    every, times = draw(st.integers(1, 6)), draw(st.none() | st.integers(1, 4))
    own = {"keep_last": draw(st.integers(1, 5)), "keep_every_steps": times and every * times}
    return CheckpointConfig(every_steps=every, **own)


@given(HISTORIES, configs())
def test_laws_of_what_is_kept(scores, config):
    reasons = kept(scores, config)
    assert list(reasons) == sorted(reasons.keys() & scores.keys())
    assert all(reasons.values())
    names = ("last", "best", "every")
    last, best, milestones = ([step for step, why in reasons.items() if name in why] for name in names)
    assert last == sorted(scores)[-config.keep_last :]
    ranks = [(-score, step) for step, score in scores.items() if score is not None]
    assert best == [step for _, step in sorted(ranks)[:1]]
    every = config.keep_every_steps
    assert milestones == [step for step in sorted(scores) if every and step % every == 0]
    assert kept({step: scores[step] for step in reasons}, config) == reasons  # looking twice deletes nothing more
    alive = {}
    for step in sorted(scores):
        alive[step] = scores[step]
        alive = {step: alive[step] for step in kept(alive, config)}
        assert step in alive, "the newest one was deleted"
    assert alive.keys() == reasons.keys(), "pruning after every checkpoint ends where pruning once does"


def write(folder, step, **scores):
    contents = {"weight": torch.full((40,), float(step))}
    files = {f"{name}.safetensors": contents for name in ("encoder", "optimizer", "objective")}
    return checkpoint.save(folder, state_of(step, **scores), files)


def test_broken_ones_neither_count_nor_stay(tmp_path):
    for step, score in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        write(tmp_path, step, mrr=score)
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


def test_an_old_state_without_sizes_is_read(tmp_path):
    path = write(tmp_path, 5)
    state = checkpoint.read_state(path)
    assert state.sizes == {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    fields = state.model_dump(exclude={"sizes", "skipped", "skipped_in_a_row"})
    assert RunState.model_validate(fields).sizes == {}


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


@given(st.dictionaries(st.integers(1, 50), st.integers(0, 4).map(float), max_size=12))
def test_laws_of_a_best_score(scores):
    if not scores:
        assert early_end(scores, "mrr", 1) is None
        return
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


@pytest.mark.parametrize("name", ["encoder.safetensors", "state.json"])
def test_a_broken_best_is_named_and_the_next_is_taken(tmp_path, log, name):
    for step, score in ((2, 0.5), (4, 0.9), (6, 0.1)):
        write(tmp_path, step, mrr=score)
    truncate(checkpoint.checkpoint_path(tmp_path, 4) / name)
    assert find_best(tmp_path, "mrr")[1].step == 2
    says(log, "skipping a broken checkpoint", "step-00000004")


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
    write_tensors(path, {})
    assert load_file(path) == {}


def test_a_limit_on_files_is_an_error_with_its_number(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path / "it", TENSORS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
