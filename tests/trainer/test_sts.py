"""STS-B as a score of a validation; which half of the rows chooses, and what is said of the difference."""

import pickle

import numpy as np
import pytest
import tinyruns as runs
import torch
from groups import run_group
from messages import all_of, says
from prepared import Row, write_prepared
from scipy.stats import spearmanr
from tiny import VOCAB_SIZE, tiny_encoder
from tinyruns import state_of
from torch import nn

from declutr.common.errors import DataError
from declutr.trainer.build import build_parts, build_validator
from declutr.trainer.checkpoints.state import Reported, RunState
from declutr.trainer.driver.checks import validation_problems
from declutr.trainer.driver.export import verdict_of
from declutr.trainer.metrics.config import SICKR, STSB
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs
from declutr.trainer.metrics.sts import StsValidator
from declutr.trainer.model.behind import Dense
from declutr.trainer.objectives.scores import RowScore, choosing_rows, divide
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan

LINE = "main\tnews\t2012\t1\t{score}\t{first}\t{second}"


def pairs(number=9):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (2 * number,), generator=generator).tolist()
    ids = [torch.randint(4, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]
    return ids, [float(score) for score in torch.rand(number, generator=generator) * 5]


def score(comm, dense=False):
    torch.manual_seed(0)
    layers = [Dense(nn.Linear(16, 3).double(), nn.Tanh())] * dense
    encoder = tiny_encoder(dropout=0.5)
    found = StsValidator(*pairs(), layers, comm, torch.device("cpu")).scores(encoder)
    assert encoder.training
    return found["stsb_spearman"]


def test_the_score_is_the_rank_correlation_of_cosines():
    encoder, (ids, gold) = tiny_encoder(dropout=0.5).eval(), pairs()
    alone = [StsValidator([text], [0.0], [], Communicator(), torch.device("cpu")) for text in ids]
    with torch.no_grad():
        vectors = torch.stack([encoder.hidden(one._batch(slice(0, 1))).mean(0) for one in alone])
    cosines = torch.cosine_similarity(vectors[:9], vectors[9:], dim=1).tolist()
    assert score(Communicator()) == pytest.approx(100 * spearmanr(cosines, gold).statistic, rel=1e-9)
    assert score(Communicator(), dense=True) != score(Communicator())


@pytest.mark.dist
def test_workers_share_the_pairs():
    assert run_group(3, score) == pytest.approx([score(Communicator())] * 3, rel=1e-12)


def test_equal_embeddings_score_zero_and_broken_ones_nothing():
    encoder = tiny_encoder()
    validator = StsValidator([[5, 6]] * 4, [1.0, 2.0], [], Communicator(), torch.device("cpu"))
    assert validator.scores(encoder) == {"stsb_spearman": 0.0}
    with torch.no_grad():
        encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("nan")
    assert validator.scores(encoder) is None


def test_all_rows_are_trained_on_if_stsb_validates(tmp_path):
    """validation_fraction=0, as in the papers' configs: only STS-B is scored. Without it, the run is refused."""
    write_prepared(tmp_path / "data", [[Row(f"word{n} " * 40) for n in range(9)]], geometry=runs.GEOMETRY)
    write(tmp_path, "\n".join(LINE.format(score=n, first=f"word{n}", second="word") for n in range(6)))
    settings = {"every_steps": 2, "stsb": str(tmp_path)}
    changes = {"encoder": {"from_config": runs.FROM_CONFIG}, "objective": {"kind": "declutr"}}
    config = runs.train_config(tmp_path / "data", tmp_path / "run", **changes, validation=settings)
    plan = RunPlan.of(config)
    assert plan.manifest.totals["kept_held_out"] == 0
    assert validation_problems(plan) == []
    parts = build_parts(plan, Communicator(), torch.device("cpu"))
    assert build_validator(plan, parts, torch.device("cpu")).scores(parts.encoder).keys() == {STSB}
    for other in ({"every_steps": 2}, settings | {"score": "mrr"}):
        config = runs.train_config(tmp_path / "data", tmp_path / "run", **changes, validation=other)
        says(validation_problems(RunPlan.of(config))[0], "0 held-out documents", "at least 2")


def write(folder, text):
    (folder / "sts-dev.csv").write_bytes(text.encode())
    return folder


def test_a_file_with_notes_and_windows_line_ends_is_read(tmp_path):
    lines = [
        LINE.format(score=5, first='a "quoted', second="b") + "\tnote\tlicence\r",
        LINE.format(score=0.25, first="c", second="d"),
    ]
    assert read_pairs(write(tmp_path, "\n".join(lines) + "\n")) == [(5.0, 'a "quoted', "b"), (0.25, "c", "d")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "folder of STS-B"),
        ("", "0 pairs"),
        ("a,b,c\n", ("line 1", "at least 7")),
        (LINE.format(score="high", first="a", second="b"), ("line 1", "expected")),
        ("\n".join(LINE.format(score=n, first="a", second="b") for n in (1, 9)), ("line 2", "score", "0", "5")),
        (LINE.format(score="nan", first="a", second="b"), ("score", "0", "5")),
        (LINE.format(score=1, first=" ", second="b"), "two texts"),
    ],
)
def test_damaged_files_are_named(tmp_path, text, message):
    folder = tmp_path if text is None else write(tmp_path, text)
    with pytest.raises(DataError, match=all_of(message)) as error:
        read_pairs(folder)
    assert "sts-dev.csv" in str(error.value)


def write_sick(folder, rows):
    header = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
    (folder / "SICK_trial.txt").write_text(header + "".join(rows), newline="")
    return folder


def test_sick_is_read_without_its_header_and_is_the_default_score_without_stsb(tmp_path):
    folder = write_sick(tmp_path, ["4\ta b\tc\t3.6\tNEUTRAL\r\n", "5\td\te\t1\tCONTRADICTION\r\n"])
    assert read_pairs(folder, FILES[SICKR]) == [(3.6, "a b", "c"), (1.0, "d", "e")]
    validation = {"every_steps": 2, "sickr": str(folder)}
    assert runs.least_config(validation=validation).validation.score == SICKR
    both = runs.least_config(validation=validation | {"stsb": str(folder)}).validation
    assert (both.score, list(both.pairs)) == (STSB, [STSB, SICKR])
    assert "validation.sickr" not in RunPlan.of(runs.least_config(validation=validation)).unreadable


@pytest.mark.parametrize(
    ("rows", "message"), [(["4\ta\tb\t0.5\tx\n"] * 2, "from 1 to 5"), (["4\ta\tb\n"], "column 4"), ([], "0 pairs")]
)
def test_damaged_sick_is_named_before_a_run(tmp_path, rows, message):
    config = runs.least_config(validation={"every_steps": 2, "sickr": str(write_sick(tmp_path, rows))})
    problem = RunPlan.of(config).unreadable["validation.sickr"]
    assert problem.startswith(f"validation.sickr = {tmp_path}")
    assert message in problem


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
    config = runs.least_config(**changes)
    return verdict_of(6 if config.validation.every_steps else 0, config.seed, told)


def test_a_verdict_names_start_export_difference_rows_and_interval():
    worse, better = np.linspace(0, 0.8, 150), np.linspace(0.2, 1, 150)
    found = verdict(state(worse.tolist(), better.tolist()))
    assert (found["start"], found["exported"], found["rows"]) == (pytest.approx(0.4), pytest.approx(0.6), 150)
    assert found["measurable"]
    says(found["sentence"], "mrr", "0.4000 at the start", "0.6000 exported", "+0.2000", "95%", "scored 6 times")
    assert found["looks"] == 6
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
        (state([0.1], [0.1, 0.2]), {}, ("other rows", "validation.data")),
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
