"""What is kept: laws over all histories, and real folders."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from states import state_of

from declutr.common.errors import CheckpointError, UnreadableError
from declutr.trainer.checkpoints import checkpoint, retention
from declutr.trainer.checkpoints.config import CheckpointConfig
from declutr.trainer.checkpoints.retention import kept
from declutr.trainer.checkpoints.state import RunState

HISTORIES = st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 1), max_size=20)
CONFIGS = st.builds(
    lambda every, keep_last, times: CheckpointConfig(
        every_steps=every, keep_last=keep_last, keep_every_steps=None if times is None else every * times
    ),
    st.integers(1, 6),
    st.integers(1, 5),
    st.none() | st.integers(1, 4),
)


@given(HISTORIES, CONFIGS)
def test_laws_of_what_is_kept(scores, config):
    found = kept(scores, config)
    assert set(found) <= set(scores)
    assert list(found) == sorted(found)
    assert all(found.values())
    assert [step for step, why in found.items() if "last" in why] == sorted(scores)[-config.keep_last :]
    best = [step for step, why in found.items() if "best" in why]
    validated = {step: score for step, score in scores.items() if score is not None}
    assert len(best) == bool(validated)
    for step in best:
        assert scores[step] == max(validated.values())
        assert all(other >= step for other, score in validated.items() if score == scores[step])
    milestones = {step for step in scores if config.keep_every_steps and step % config.keep_every_steps == 0}
    assert milestones == {step for step, why in found.items() if "every" in why}
    again = kept({step: scores[step] for step in found}, config)
    assert again == found  # looking twice deletes nothing more


@given(HISTORIES, CONFIGS)
def test_pruning_after_every_checkpoint_ends_where_pruning_once_does(scores, config):
    alive = {}
    for step in sorted(scores):
        alive[step] = scores[step]
        alive = {step: alive[step] for step in kept(alive, config)}
        assert step in alive, "the newest one was deleted"
    assert alive.keys() == kept(scores, config).keys()


def write(folder, step, score=None):
    state = state_of(step) if score is None else state_of(step, mrr=score)
    return checkpoint.save(folder, state, {"encoder.safetensors": {"weight": torch.full((40,), float(step))}})


def truncate(path):
    with (path / "encoder.safetensors").open("r+b") as stream:
        stream.truncate(50)


def test_broken_ones_neither_count_nor_stay(tmp_path):
    for step, score in ((1, 0.9), (2, 0.1), (3, None), (4, 0.3)):
        write(tmp_path, step, score)
    truncate(checkpoint.checkpoint_path(tmp_path, 4))
    (tmp_path / "step-00000003" / "state.json").unlink()
    write(tmp_path, 6)
    retention.prune(tmp_path, CheckpointConfig(keep_last=2), "mrr", 6)
    assert checkpoint.steps_in(tmp_path) == [1, 2, 6]


@pytest.mark.parametrize("broken", [True, False])
def test_a_checkpoint_beyond_the_newest_never_displaces_it(tmp_path, broken):
    """Step 8 was passed over, the run went on from 6 and saved 7: keep_last = 1 must not mean 8."""
    for step in (6, 7, 8):
        write(tmp_path, step)
    if broken:
        shutil.rmtree(tmp_path / "step-00000008")
        (tmp_path / "step-00000008").mkdir()
    retention.prune(tmp_path, CheckpointConfig(keep_last=1), "mrr", 7)
    assert checkpoint.steps_in(tmp_path) == ([7] if broken else [7, 8])
    _, state = checkpoint.find_latest(tmp_path)
    assert state.step == (7 if broken else 8)


def test_a_file_that_is_longer_or_altered_is_broken(tmp_path):
    longer, altered = (write(tmp_path, step) / "encoder.safetensors" for step in (4, 5))
    with longer.open("ab") as stream:
        stream.write(b"x")
    raw = bytearray(altered.read_bytes())
    raw[-1] ^= 1
    altered.write_bytes(raw)
    with pytest.raises(CheckpointError):
        checkpoint.read_state(longer.parent, verify=False)
    assert checkpoint.read_state(altered.parent, verify=False).step == 5
    with pytest.raises(CheckpointError):
        checkpoint.read_state(altered.parent)


def test_latest_of_this_run(tmp_path):
    write(tmp_path, 5)
    found = checkpoint.find_latest(tmp_path, {"config_hash": "c", "data_hash": "d"})
    assert found is not None
    assert checkpoint.find_latest(tmp_path, {"config_hash": "another", "data_hash": "d"}) is None
    assert checkpoint.find_latest(tmp_path / "nothing") is None


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    (tmp_path / "checkpoints").write_text("no folder")
    with pytest.raises(NotADirectoryError):
        checkpoint.find_latest(tmp_path / "checkpoints")


def test_an_old_state_without_sizes_is_read(tmp_path):
    path = write(tmp_path, 5)
    state = checkpoint.read_state(path)
    assert state.sizes == {"encoder.safetensors": (path / "encoder.safetensors").stat().st_size}
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
    retention.prune(tmp_path, CheckpointConfig(keep_last=1), "mrr", 6)
    assert checkpoint.steps_in(tmp_path) == [6], "it may be whole"
