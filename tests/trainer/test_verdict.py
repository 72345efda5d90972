"""One half of the held-out rows chooses, the other reports; and what is said of the difference to the start."""

import pickle

import numpy as np
import pytest
import tinyruns as runs
from messages import says
from scipy.stats import spearmanr
from states import state_of

from declutr.trainer.checkpoints.state import Reported, RunState
from declutr.trainer.driver.export import verdict_of
from declutr.trainer.objectives.row_score import RowScore, choosing_rows, divide

KEYS = np.random.default_rng(0).integers(0, 2**64, 301, dtype=np.uint64)


def test_a_row_is_in_the_same_half_in_whatever_order_the_rows_come():
    chosen = choosing_rows(3, KEYS)
    assert chosen.sum() == 151
    order = np.random.default_rng(1).permutation(len(KEYS))
    assert (choosing_rows(3, KEYS[order]) == chosen[order]).all()
    assert not (choosing_rows(4, KEYS) == chosen).all()
    assert choosing_rows(3, KEYS[:2]).sum() == 1, "both halves have a row"


def test_scores_choose_by_one_half_and_report_the_other():
    values = np.random.default_rng(2).random(len(KEYS))
    pairs = np.stack([values, np.arange(len(KEYS)) % 5 + values], axis=1)
    found = {"rank": 7.0, "mrr": RowScore(KEYS, values), "sts": RowScore(KEYS, pairs)}
    assert found["mrr"] == pytest.approx(values.mean())
    assert found["sts"] == pytest.approx(100 * spearmanr(*pairs.T).statistic)
    scores, name, rows = divide(found, 3, "sts")
    mine = choosing_rows(3, KEYS)
    assert scores == {
        "rank": 7.0,
        "mrr": pytest.approx(values[mine].mean()),
        "sts": pytest.approx(100 * spearmanr(*pairs[mine].T).statistic),
        "reported_sts": pytest.approx(100 * spearmanr(*pairs[~mine].T).statistic),
    }
    assert all(type(value) is float for value in scores.values()), "Ray and JSON need no class of ours"
    assert (name, rows.tolist()) == ("sts", pairs[~mine].tolist())
    assert divide(found, 3, "")[1] == "mrr"
    assert divide({"rank": 7.0}, 3, "mrr") == ({"rank": 7.0}, "", pytest.approx(np.empty(0)))
    again = pickle.loads(pickle.dumps(found["sts"]))
    assert (again, again.values.tolist()) == (found["sts"], pairs.tolist())


def state(start, rows, score="mrr"):
    return state_of(8, mrr=0.5).model_copy(update={"reported": Reported(score=score, start=start, rows=rows)})


def verdict(told, **changes):
    return verdict_of(runs.least_config(**changes), told)


def test_a_verdict_names_start_export_difference_rows_and_interval():
    worse, better = np.linspace(0, 0.8, 150), np.linspace(0.2, 1, 150)
    found = verdict(state(worse.tolist(), better.tolist()))
    assert (found["start"], found["exported"], found["rows"]) == (pytest.approx(0.4), pytest.approx(0.6), 150)
    assert found["measurable"]
    says(found["sentence"], "mrr", "0.4000 at the start", "0.6000 exported", "+0.2000", "95%")
    equal = verdict(state(worse.tolist(), worse[::-1].tolist()))
    assert (equal["rows"], equal["measurable"]) == (150, False)
    few = verdict(state([0.1] * 99, [0.2] * 99))
    assert few["interval"] is None
    says(few["sentence"], "99 rows", "no interval", "100")
    assert verdict(state(worse.tolist(), better.tolist())) == found, "the draws follow from the seed"


def test_correlations_are_compared_as_correlations():
    gold = np.arange(200) % 6
    noise = np.random.default_rng(0).normal(size=200)
    rows = [np.stack([gold + scale * noise, gold], axis=1).tolist() for scale in (3.0, 0.1)]
    found = verdict(state(*rows, score="stsb_spearman"))
    assert found["start"] == pytest.approx(100 * spearmanr(*np.array(rows[0]).T).statistic)
    assert found["measurable"]


@pytest.mark.parametrize(
    ("told", "changes", "sentence"),
    [
        (state_of(8), {"validation": {"every_steps": 0}}, ("not validated", "validation.every_steps = 0")),
        (state_of(8), {}, ("no score", "held-out rows", "the start")),
        (state([], [0.1]), {}, ("the start", "not validated")),
        (
            state([0.1], [0.1, 0.2]),
            {},
            ("other rows", "validation.data"),
        ),
        (state([0.1], []), {}, ("step 8", "not validated")),
    ],
)
def test_without_rows_the_reason_is_said(told, changes, sentence):
    found = verdict(told, **changes)
    assert list(found) == ["sentence"]
    says(found["sentence"], sentence)


def test_rows_come_back_from_a_checkpoint():
    pairs = state([[0.1, 5.0]], [[0.25, 5.0]])
    assert RunState.model_validate(pairs.model_dump(mode="json"), strict=True) == pairs
