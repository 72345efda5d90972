"""The file between a follower and the trainer: whole lines only, whatever was killed."""

import pytest
from diskcalls import disk_calls

from declutr.common.scores import SCORES, ScoreLine, append_score, comparable, read_scores


def line(step, **changes):
    values = {"step": step, "checkpoint": f"c{step}", "choice": "x", "score": 50.0 + step, "tasks": {"MR": 50.0}}
    values["test"] = {"MR": 49.0}
    return ScoreLine(**values | changes)


def test_lines_come_back_in_their_order(tmp_path):
    assert read_scores(tmp_path) == ()
    written = [line(4), line(2, score=None, warnings=("collapsed",))]
    for one in written:
        append_score(tmp_path, one)
    assert read_scores(tmp_path) == tuple(written)


def test_a_line_that_was_cut_off_is_none_wherever_it_was_cut(tmp_path):
    append_score(tmp_path, line(2))
    append_score(tmp_path, line(4))
    whole = (tmp_path / SCORES).read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        (tmp_path / SCORES).write_bytes(whole[:length])
        assert read_scores(tmp_path) == (line(2),)
        append_score(tmp_path, line(6))
        expected = (line(2), line(4), line(6)) if length == len(whole) - 1 else (line(2), line(6))
        assert read_scores(tmp_path) == expected


def test_scores_of_the_newest_choice_are_comparable():
    lines = [line(2), line(4, choice="y"), line(6, choice="y", score=None), line(8, choice="y")]
    assert comparable(lines) == {(4, "c4"): 54.0, (8, "c8"): 58.0}
    assert comparable(lines[:1]) == {(2, "c2"): 52.0}
    assert comparable([]) == {}


def test_a_name_that_is_not_known_is_no_setting():
    with pytest.raises(ValueError, match="extra"):
        line(1, mean=3)


APPEND = """
from declutr.common.scores import ScoreLine, append_score
def prepare(here): pass
def act(here):
    for step in (1, 2):
        append_score(here, ScoreLine(step=step, checkpoint="c", choice="x", score=1.0, tasks={}, test={}))
"""


def test_each_score_is_one_line_on_disk(tmp_path):
    assert disk_calls(APPEND, tmp_path) == [["fsync", SCORES]] * 2
    assert (tmp_path / "0" / SCORES).read_text().count("\n") == 2
