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


def line(score, first="a", second="b"):
    return f"main\tnews\t2012\t1\t{score}\t{first}\t{second}"


def write(folder, text):
    (folder / "sts-dev.csv").write_bytes(text.encode())
    return folder


def pairs(number=9):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 20, (2 * number,), generator=generator).tolist()
    ids = [torch.randint(4, VOCAB_SIZE - 1, (length,), generator=generator).tolist() for length in lengths]
    return ids, [float(score) for score in torch.rand(number, generator=generator) * 5]


def validator(ids, gold, layers=(), comm=None):
    return StsValidator(ids, gold, list(layers), comm or Communicator(), torch.device("cpu"))


def score(comm, dense=False):
    torch.manual_seed(0)
    encoder, layers = tiny_encoder(dropout=0.5), [Dense(nn.Linear(16, 3).double(), nn.Tanh())] * dense
    scores = validator(*pairs(), layers, comm).scores(encoder)
    assert encoder.training
    return scores["stsb_spearman"]


@pytest.mark.dist
def test_the_score_is_the_rank_correlation_of_cosines_on_any_number_of_workers():
    encoder, (ids, gold) = tiny_encoder(dropout=0.5).eval(), pairs()
    alone = [validator([text], [0.0])._batch(slice(0, 1)) for text in ids]
    with torch.no_grad():
        vectors = torch.stack([encoder.hidden(batch).mean(0) for batch in alone])
    cosines = torch.cosine_similarity(vectors[:9], vectors[9:], dim=1).tolist()
    expected = 100 * spearmanr(cosines, gold).statistic
    assert score(Communicator()) == pytest.approx(expected, rel=1e-9)
    assert run_group(3, score) == pytest.approx([score(Communicator())] * 3, rel=1e-12)
    assert score(Communicator(), dense=True) != score(Communicator())


def test_equal_embeddings_score_zero_and_broken_ones_nothing():
    encoder, equal = tiny_encoder(), validator([[5, 6]] * 4, [1.0, 2.0])
    assert equal.scores(encoder) == {"stsb_spearman": 0.0}
    with torch.no_grad():
        encoder.model.base_model.embeddings.LayerNorm.bias[0] = float("nan")
    assert equal.scores(encoder) is None


def test_all_rows_are_trained_on_if_stsb_validates(tmp_path):
    """validation_fraction=0, as in the papers' configs: only STS-B is scored. Without it, the run is refused."""
    write_prepared(tmp_path / "data", [[Row(f"word{n} " * 40) for n in range(9)]], geometry=runs.GEOMETRY)
    write(tmp_path, "\n".join(line(n, f"word{n}", "word") for n in range(6)))
    settings = {"every_steps": 2, "stsb": str(tmp_path)}
    validations = settings, {"every_steps": 2}, settings | {"score": "mrr"}
    configs = [runs.train_config(tmp_path / "data", tmp_path / "run", validation=chosen) for chosen in validations]
    plan, *others = map(RunPlan.of, configs)
    assert (plan.manifest.totals["kept_held_out"], validation_problems(plan)) == (0, [])
    parts = build_parts(plan, Communicator(), torch.device("cpu"))
    assert build_validator(plan, parts, torch.device("cpu")).scores(parts.encoder).keys() == {STSB}
    for other in others:
        says(validation_problems(other)[0], "0 held-out documents", "at least 2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "sts-dev.csv: No such file or directory; name the folder of STS-B"),
        ("", "0 pairs"),
        ("a,b,c\n", ("line 1", "at least 7")),
        (line("high"), ("line 1", "expected")),
        (f"{line(1)}\n{line(9)}", ("line 2", "score", "0", "5")),
        (line("nan"), ("score", "0", "5")),
        (line(1, " "), "two texts"),
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


def test_files_are_read_and_sick_is_the_default_score_without_stsb(tmp_path):
    """STS-B's with notes and the line ends of Windows, SICK's without its header."""
    lines = [line(5, 'a "quoted') + "\tnote\tlicence\r", line(0.25, "c", "d")]
    assert read_pairs(write(tmp_path, "\n".join(lines) + "\n")) == [(5.0, 'a "quoted', "b"), (0.25, "c", "d")]
    folder = write_sick(tmp_path, ["4\ta b\tc\t3.6\tNEUTRAL\r\n", "5\td\te\t1\tCONTRADICTION\r\n"])
    assert read_pairs(folder, FILES[SICKR]) == [(3.6, "a b", "c"), (1.0, "d", "e")]
    validation = {"every_steps": 2, "sickr": str(folder)}
    config = runs.least_config(validation=validation)
    assert config.validation.score == SICKR
    assert "validation.sickr" not in RunPlan.of(config).unreadable
    both = runs.least_config(validation=validation | {"stsb": str(folder)}).validation
    assert (both.score, list(both.pairs)) == (STSB, [STSB, SICKR])


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
    half = choosing_rows(3, KEYS)
    chosen, reported = (100 * spearmanr(*pairs[rows].T).statistic for rows in (half, ~half))
    expected = {"rank": 7.0, "mrr": values[half].mean(), "sts": chosen, "reported_sts": reported}
    assert scores == pytest.approx(expected)
    assert all(type(value) is float for value in scores.values()), "Ray and JSON need no class of ours"
    assert (name, rows.tolist()) == ("sts", pairs[~half].tolist())
    assert divide(found, 3, "")[1] == "mrr"
    assert divide({"rank": 7.0}, 3, "mrr") == ({"rank": 7.0}, "", pytest.approx(np.empty(0)))
    again = pickle.loads(pickle.dumps(found["sts"]))
    assert (again, again.values.tolist()) == (found["sts"], pairs.tolist())


def state(start, rows, score="mrr"):
    return state_of(8, mrr=0.5).model_copy(update={"reported": Reported(score=score, start=start, rows=rows)})


def verdict(checkpoint, looks=6):
    return verdict_of(looks, 0, checkpoint)


def test_a_verdict_names_start_export_difference_rows_and_interval():
    worse, better = np.linspace(0, 0.8, 150), np.linspace(0.2, 1, 150)
    found = verdict(state(worse.tolist(), better.tolist()))
    assert verdict(state(worse.tolist(), better.tolist())) == found, "the draws follow from the seed"
    assert (found["start"], found["exported"], found["rows"]) == (pytest.approx(0.4), pytest.approx(0.6), 150)
    assert (found["measurable"], found["looks"]) == (True, 6)
    says(found["sentence"], "mrr", "0.4000 at the start", "0.6000 exported", "+0.2000", "95%", "scored 6 times")
    equal = verdict(state(worse.tolist(), worse[::-1].tolist()))
    assert (equal["rows"], equal["measurable"]) == (150, False)
    few = verdict(state([0.1] * 99, [0.2] * 99))
    assert few["interval"] is None
    says(few["sentence"], "99 rows", "no interval", "100")


def test_correlations_are_compared_as_correlations_and_come_back_from_a_checkpoint():
    gold, noise = np.arange(200) % 6, np.random.default_rng(0).normal(size=200)
    rows = [np.stack([gold + scale * noise, gold], axis=1).tolist() for scale in (3.0, 0.1)]
    checkpoint = state(*rows, score="stsb_spearman")
    assert RunState.model_validate(checkpoint.model_dump(mode="json"), strict=True) == checkpoint
    found = verdict(checkpoint)
    assert found["start"] == pytest.approx(100 * spearmanr(*np.array(rows[0]).T).statistic)
    assert found["measurable"]


@pytest.mark.parametrize(
    ("checkpoint", "looks", "sentence"),
    [
        (state_of(8), 0, ("not validated", "validation.every_steps = 0")),
        (state_of(8), 6, ("no score", "held-out rows", "the start")),
        (state([], [0.1]), 6, ("the start", "not validated")),
        (state([0.1], [0.1, 0.2]), 6, ("other rows", "validation.data")),
        (state([0.1], []), 6, ("step 8", "not validated")),
    ],
)
def test_without_rows_the_reason_is_said(checkpoint, looks, sentence):
    found = verdict(checkpoint, looks)
    assert list(found) == ["sentence"]
    says(found["sentence"], sentence)
