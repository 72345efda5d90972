"""Several corpora in one task: shares, order, settings and their problems, and a run that is resumed."""

import json
import random
import shutil

import numpy as np
import pytest
import tinyruns as runs
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from preparing import prepare_rows
from tinyruns import problems

from declutr.cli.main import main
from declutr.pipeline.shards.shards import ShardSet
from declutr.report.runs import write_runs_page
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.plan import MOST_TURNS, Plan, turns, whole_shares
from declutr.trainer.driver import estimate
from declutr.trainer.train import run_training

shares = st.lists(st.integers(1, 60), min_size=2, max_size=6).map(whole_shares)


def text(rng):
    return " ".join(rng.choices("abcdefghij", k=rng.randint(90, 200)))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two folders of documents, one with other spans, one with another tokenizer, one of sentences."""
    top, rng = tmp_path_factory.mktemp("corpora"), random.Random(0)
    common = {"texts": [text(rng) for _ in range(50)], "validation_fraction": 0.1}

    def prepared(name, number, kind="documents", **changes):
        rows = [{"text": f"{text(rng)} {row}"} for row in range(number)]
        spans = {"geometry": runs.GEOMETRY} if kind == "documents" else {}
        return prepare_rows(top / name, kind, rows, **common | spans | changes)[0]

    return {
        "one": prepared("one", 60),
        "two": prepared("two", 90),
        "longer": prepared("longer", 20, geometry=runs.GEOMETRY | {"max_tokens": 20}),
        "other": prepared("other", 40, texts=[text(rng).upper() for _ in range(50)]),
        "sentences": prepared("sentences", 40, kind="sentences"),
    }


def several(*folders, weights=(2, 0.5)):
    return [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights, strict=False)]


def refused(tmp_path, capsys, data):
    """What `declutr train` says about this setting; Ray is never started."""
    values = runs.train_values("data", tmp_path / "run") | {"data": data}
    assert main(["train", str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    return capsys.readouterr().err


@given(shares)
def test_turns_after_any_number_of_rows_differ_from_the_shares_by_less_than_one(given_shares):
    corpora, places = turns(given_shares)
    read = np.cumsum(np.eye(len(given_shares), dtype=int)[corpora], axis=0)
    exact = np.arange(1, len(corpora) + 1)[:, None] * np.array(given_shares) / len(corpora)
    assert np.abs(read - exact).max() < 1
    assert read[-1].tolist() == list(given_shares)
    assert (places == read[np.arange(len(corpora)), corpora] - 1).all()


@given(shares, st.integers(1, 40), st.integers(0, 300), st.data())
def test_shares_are_exact_and_epochs_each_corpus_own_also_after_a_resume(given_shares, batch, begun, data):
    sizes = tuple(data.draw(st.lists(st.integers(5, 50), min_size=len(given_shares), max_size=len(given_shares))))
    plan = Plan(3, sum(sizes), batch, sizes=sizes, shares=given_shares)
    steps = plan.steps_in(10)
    begun = min(begun, steps)
    parts = plan.documents(0, begun), plan.documents(begun, steps)  # a run that stops and is resumed
    epochs, documents = (np.concatenate(part) for part in zip(*parts, strict=True))
    corpora = np.searchsorted(np.cumsum(sizes), documents, side="right")
    read = np.bincount(corpora, minlength=len(sizes)).tolist()
    assert np.abs(read - steps * batch * np.array(given_shares) / sum(given_shares)).max() < 1
    assert read == plan.rows_read(steps)
    in_batches = np.diff([plan.rows_read(step) for step in range(steps + 1)], axis=0)
    assert (in_batches.max(axis=0) <= plan.most_in_batch()).all()
    for corpus, size in enumerate(sizes):
        for epoch in range(read[corpus] // size):
            rows = documents[(corpora == corpus) & (epochs == epoch)] - sum(sizes[:corpus])
            assert sorted(rows.tolist()) == list(range(size))


def test_corpora_of_one_size_have_different_orders():
    plan = Plan(3, 80, 80, sizes=(40, 40), shares=(1, 1))
    _, documents = plan.documents(0, 1)
    assert (documents[documents < 40] != documents[documents >= 40] - 40).any()
    assert documents[documents < 40].tolist() == Plan(3, 40, 40).documents(0, 1)[1].tolist()


def test_weights_are_the_decimals_that_were_written():
    shares = {(0.7, 0.3): (7, 3), (2, 0.5): (4, 1), (5,): (1,), (0.1, 0.2, 0.3): (1, 2, 3)}
    assert {weights: whole_shares(weights) for weights in shares} == shares


@pytest.mark.parametrize("part", [None, (0.5, 7)])
def test_documents_of_several_corpora_are_numbered_one_after_the_other(corpora, part):
    first, second = corpora["one"], corpora["two"]
    joined = ShardSet(first, "train", part=part, others=[second])
    single = [ShardSet(folder, "train", part=part) for folder in (first, second)]
    assert joined.sizes == tuple(shards.num_documents for shards in single)
    ids = [name for shards in single for name in shards.take(np.arange(shards.num_documents))["id"].to_pylist()]
    rows = np.random.default_rng(0).permutation(joined.num_documents)
    assert joined.take(rows)["id"].to_pylist() == [ids[row] for row in rows.tolist()]
    totals = [shards.manifest.totals["kept_train"] for shards in (joined, *single)]
    assert totals[0] == totals[1] + totals[2]


NO_NUMBERS = {
    -1: "greater than 0", 0: "greater than 0", float("nan"): "finite number", float("inf"): "finite number",
    "1/3": "valid number", True: "number is needed", None: "valid number",
}  # fmt: skip
REFUSED = [
    *([[1, weight], ("data.1.weight", reason)] for weight, reason in NO_NUMBERS.items()),
    [[0.3333333, 0.6666667], ("data", "10,000,000 rows", f"{MOST_TURNS:,}", "500, 1000")],  # its period is too long
    [None, ("data", "a list of corpora", "[{path: FOLDER, weight: 1}")],  # a section in place of the list
]


@pytest.mark.parametrize(("weights", "facts"), REFUSED)
def test_weights_that_are_no_shares_are_refused(corpora, tmp_path, capsys, weights, facts):
    data = several(corpora["one"])[0] if weights is None else several(corpora["one"], corpora["two"], weights=weights)
    message = refused(tmp_path, capsys, data)
    says(message, *facts)
    assert "1 problem(s)" in message or weights is None or weights[0] != 1


def test_all_problems_of_the_places_are_listed_at_once(corpora, tmp_path, capsys):
    data = several(corpora["one"], tmp_path / "nowhere", weights=[-1, 1])
    message = refused(tmp_path, capsys, [*data, {"path": "x", "wieght": 2}])
    problems = {"0.weight": "= -1", "1.path": "no such folder", "2.wieght": "unknown key", "2.weight": "missing"}
    for name, problem in problems.items():
        says(message, f"data.{name}", problem)


def test_corpora_that_were_prepared_otherwise_or_are_copies_are_refused(corpora, tmp_path):
    first = corpora["one"]
    otherwise = {
        "longer": "geometry.max_tokens is 20, not 16", "other": "tokenizer is", "sentences": "content.kind is"
    }  # fmt: skip
    places = {corpora[name]: (corpora[name], first, why, "prepare both alike") for name, why in otherwise.items()}
    copies = shutil.copytree(first, tmp_path / "copy"), f"{first}/../out"
    for place, facts in (places | dict.fromkeys(copies, ("holds the same shards as", "data.0.path"))).items():
        config = runs.train_config(several(first, place), tmp_path / "run")
        says(problems(config), "data.1.path", facts)


def test_a_batch_that_repeats_documents_of_a_small_corpus_is_refused(corpora, tmp_path):
    data = several(corpora["one"], corpora["two"], weights=[4, 1])
    for changes, facts in (
        ({"batch_documents": 70}, ("batch_documents = 70", "57 rows of")),
        ({"batch_documents": 16, "data_fraction": 0.1}, ("data_fraction = 0.1", "14", "increase it")),
    ):
        says(problems(runs.train_config(data, tmp_path / "run", **changes)), facts, corpora["one"])


def local_values(corpora, run):
    data = several(corpora["one"], corpora["two"])
    scaling, checkpoint = {"num_workers": 0, "elastic_determinism": True}, {"every_steps": 4, "keep_last": 3}
    return runs.train_values(data, run, steps=12, validation={"every_steps": 4}, checkpoint=checkpoint, scaling=scaling)


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    run = tmp_path_factory.mktemp("mixture") / "run"
    run_training(TrainConfig.model_validate(local_values(corpora, run)))
    return run


@pytest.mark.slow
def test_run_on_two_corpora_logs_the_rows_of_each_and_why_finds_them(corpora, trained, capsys):
    lines = runs.steps_of(trained)
    rows = [[line[f"corpus_{number}_rows"] for line in lines.values()] for number in (1, 2)]
    assert sum(rows[0]) == 12 * 8 * 4 // 5 + 1  # of 76.8
    assert [sum(both) for both in zip(*rows, strict=True)] == [8] * 12
    for step in (1, 7, 12):
        assert main(["why", str(trained), "--step", str(step)]) == 0
        shown = capsys.readouterr().out
        assert "as the run logged it" in shown
        says(shown, f"{lines[step]['corpus_1_rows']} of epoch", corpora["one"])
        assert shown.count(f"of {corpora['two']}, document") == lines[step]["corpus_2_rows"]
    document = shown.rpartition(f"of {corpora['two']}, document ")[2].partition(",")[0]
    assert main(["why", str(trained), "--document", document]) == 0
    shown = capsys.readouterr().out
    says(shown, document, corpora["two"])
    assert "step 12, position" in shown
    state = json.loads((trained / "checkpoints" / "step-00000012" / "state.json").read_text())
    held_out = [ShardSet(corpora[name], "held-out").num_documents for name in ("one", "two")]
    assert len(state["reported"]["rows"]) == sum(held_out) // 2 > max(held_out) // 2
    page = write_runs_page([trained]).read_text()
    says(page, str(corpora["one"]), "80.21%")
    card = (trained / "export" / "README.md").read_text()
    says(card, "corpus 2 (out)", "20.0% of the rows", "19 in 12 steps")
    assert str(corpora["two"]) not in card


@pytest.mark.slow
def test_plan_counts_the_passes_of_each_corpus(corpora, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "_SECONDS", 0.5)
    config = runs.write_config(tmp_path / "train.yaml", train=local_values(corpora, tmp_path / "run"))
    assert main(["train", str(config), "--plan"]) == 0
    sizes = ShardSet(corpora["one"], "train", others=[corpora["two"]]).sizes
    passes = f"{77 / sizes[0]:,.3g} pass(es) over its {sizes[0]}"
    says(capsys.readouterr().out, corpora["one"], "80.0% of the rows", passes)


@pytest.mark.slow
def test_run_with_other_weights_or_corpora_is_refused(corpora, trained):
    other = several(corpora["one"], corpora["two"], weights=[1, 1])
    turned = several(corpora["two"], corpora["one"])
    for data, facts in ((other, ("data.weight", "[4, 1]")), (turned, ("other shards", "data.0.path"))):
        says(problems(TrainConfig.model_validate(local_values(corpora, trained) | {"data": data})), facts)
