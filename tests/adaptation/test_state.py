"""What the folder of an adaptation remembers between starts of the command."""

import json

import pytest
from messages import all_of

from declutr.adaptation.config import AdaptConfig
from declutr.adaptation.state import STATE, opened
from declutr.common.errors import UsageError

CONFIG = AdaptConfig(encoder="models/x", corpus=["texts"], minutes=10)


def test_opened_after_a_stop_keeps_time_steps_and_looks(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.decide_steps(77)
        state.look("first")
    record = json.loads((tmp_path / STATE).read_text())
    (tmp_path / STATE).write_text(json.dumps(record | {"seconds": 240.0}))
    with opened(CONFIG.model_copy(update={"minutes": 5.0}), tmp_path) as state:
        assert state.steps == 77
        assert 59 < state.seconds_left <= 60
        assert [state.look(what) for what in ("first", "second", "first")] == [1, 2, 2]


def test_opened_after_a_kill_keeps_what_was_decided(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.decide_steps(77)
        killed = (tmp_path / STATE).read_bytes()
    (tmp_path / STATE).write_bytes(killed)
    with opened(CONFIG, tmp_path) as state:
        assert state.steps == 77


def test_decide_steps_of_no_time_is_decided_again(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.decide_steps(0)
    with opened(CONFIG, tmp_path) as state:
        assert state.steps is None


def test_begin_with_an_encoder_that_has_changed_is_refused(tmp_path):
    for _ in range(2):
        with opened(CONFIG, tmp_path) as state:
            state.begin("first")
    with opened(CONFIG, tmp_path) as state, pytest.raises(UsageError, match=all_of("encoder has changed", "folder")):
        state.begin("second")


def test_opened_with_another_encoder_is_refused(tmp_path):
    with opened(CONFIG, tmp_path) as state:
        state.decide_steps(77)
    with (
        pytest.raises(UsageError, match=all_of("another encoder", "another folder")),
        opened(CONFIG.model_copy(update={"encoder": "models/y"}), tmp_path),
    ):
        pass


def test_opened_with_a_damaged_file_is_refused(tmp_path):
    (tmp_path / STATE).write_text("{")
    with pytest.raises(UsageError, match=all_of("damaged", "delete", "candidates")), opened(CONFIG, tmp_path):
        pass
