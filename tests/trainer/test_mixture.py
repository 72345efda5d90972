"""Several corpora in one task: shares, order, settings and their problems, and a run that is resumed."""

import json
import random
import shutil

import numpy as np
import pytest
import tinyruns as runs
import yaml
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from preparing import prepare_rows
from tinyruns import problems

from declutr.cli.main import main
from declutr.pipeline.shards.shards import ShardSet
from declutr.report.runs import write_runs_page
from declutr.trainer.data.plan import MOST_TURNS, Plan, turns, whole_shares
from declutr.trainer.driver import estimate
from declutr.trainer.train import run_training

SIZES = (60, 90)
WEIGHTS = [2, 0.5]

shares = st.lists(st.integers(1, 60), min_size=2, max_size=6).map(whole_shares)


def text(rng):
    return " ".join(rng.choices("abcdefghij", k=rng.randint(90, 200)))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two folders of documents, one with other spans, one with another tokenizer, one of sentences."""
    top, rng = tmp_path_factory.mktemp("corpora"), random.Random(0)
    texts = [text(rng) for _ in range(50)]
    made = {"texts": texts, "validation_fraction": 0.1}

    def prepared(name, number, kind="documents", **changes):
        rows = [{"text": f"{text(rng)} {row}"} for row in range(number)]
        spans = {"geometry": runs.GEOMETRY} if kind == "documents" else {}
        return prepare_rows(top / name, kind, rows, **made | spans | changes)[0]

    return {
        "one": prepared("one", SIZES[0]),
        "two": prepared("two", SIZES[1]),
        "longer": prepared("longer", 20, geometry=runs.GEOMETRY | {"max_tokens": 20}),
        "other": prepared("other", 40, texts=[text(rng).upper() for _ in range(50)]),
        "sentences": prepared("sentences", 40, kind="sentences"),
    }


def several(*folders, weights=WEIGHTS):
    return [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights, strict=False)]


def refused(tmp_path, capsys, data, **changes):
    """What `declutr train` says about this setting; Ray is never started."""
    values = runs.train_values("data", tmp_path / "run", **changes) | {"data": data}
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump({"train": values}))
    assert main(["train", str(config)]) == 1
    return capsys.readouterr().err


@given(shares)
def test_turns_after_any_number_of_rows_differ_from_the_shares_by_less_than_one(given_shares):
    corpora, places = turns(given_shares)
    read = np.cumsum(np.eye(len(given_shares), dtype=int)[corpora], axis=0)
    wanted = np.arange(1, len(corpora) + 1)[:, None] * np.array(given_shares) / len(corpora)
    assert np.abs(read - wanted).max() < 1
    assert read[-1].tolist() == list(given_shares)
    assert (places == read[np.arange(len(corpora)), corpora] - 1).all()


@given(shares, st.integers(1, 40), st.integers(0, 300), st.data())
def test_shares_are_exact_over_ten_epochs_and_after_a_resume(given_shares, batch, begun, data):
    sizes = tuple(data.draw(st.lists(st.integers(5, 50), min_size=len(given_shares), max_size=len(given_shares))))
    plan = Plan(3, sum(sizes), batch, sizes=sizes, shares=given_shares)
    steps = plan.steps_in(10)
    begun = min(begun, steps)
    rows = [plan.documents(0, begun)[1], plan.documents(begun, steps)[1]]  # a run that stops and is resumed
    found = np.bincount(np.searchsorted(np.cumsum(sizes), np.concatenate(rows), side="right"), minlength=len(sizes))
    wanted = steps * batch * np.array(given_shares) / sum(given_shares)
    assert np.abs(found - wanted).max() < 1
    assert found.tolist() == plan.rows_read(steps)
    in_batches = np.diff([plan.rows_read(step) for step in range(steps + 1)], axis=0)
    assert (in_batches.max(axis=0) <= plan.most_in_batch()).all()


@given(shares, st.integers(1, 40))
def test_each_corpus_has_its_own_epochs(given_shares, batch):
    sizes = tuple(range(7, 7 + len(given_shares)))
    plan = Plan(3, sum(sizes), batch, sizes=sizes, shares=given_shares)
    epochs, documents = plan.documents(0, plan.steps_in(8))
    for corpus, size in enumerate(sizes):
        mine = np.searchsorted(np.cumsum(sizes), documents, side="right") == corpus
        for epoch in range(int(mine.sum()) // size):
            first = sum(sizes[:corpus])
            assert sorted(documents[mine & (epochs == epoch)].tolist()) == list(range(first, first + size))


def test_corpora_of_one_size_have_different_orders():
    plan = Plan(3, 80, 80, sizes=(40, 40), shares=(1, 1))
    _, documents = plan.documents(0, 1)
    assert (documents[documents < 40] != documents[documents >= 40] - 40).any()
    assert documents[documents < 40].tolist() == Plan(3, 40, 40).documents(0, 1)[1].tolist()


@pytest.mark.parametrize(
    ("weights", "whole"), [([0.7, 0.3], (7, 3)), ([2, 0.5], (4, 1)), ([5], (1,)), ([0.1, 0.2, 0.3], (1, 2, 3))]
)
def test_weights_are_the_decimals_that_were_written(weights, whole):
    assert whole_shares(weights) == whole


@pytest.mark.parametrize("part", [None, (0.5, 7)])
def test_documents_of_several_corpora_are_numbered_one_after_the_other(corpora, part):
    folders = [corpora["one"], corpora["two"]]
    joined = ShardSet(folders[0], "train", part=part, others=folders[1:])
    single = [ShardSet(folder, "train", part=part) for folder in folders]
    assert joined.sizes == tuple(one.num_documents for one in single)
    ids = [one.take(np.arange(one.num_documents))["id"].to_pylist() for one in single]
    rng = np.random.default_rng(0)
    rows = rng.permutation(joined.num_documents)
    assert joined.take(rows)["id"].to_pylist() == [[*ids[0], *ids[1]][row] for row in rows.tolist()]
    totals = [one.manifest.totals for one in single]
    assert joined.manifest.totals["kept_train"] == sum(one["kept_train"] for one in totals)


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
    said = refused(tmp_path, capsys, data)
    says(said, *facts)
    assert "1 problem(s)" in said or weights is None or weights[0] != 1


def test_all_problems_of_the_places_are_listed_at_once(corpora, tmp_path, capsys):
    data = several(corpora["one"], tmp_path / "nowhere", weights=[-1, 1])
    data.append({"path": "x", "wieght": 2})
    said = refused(tmp_path, capsys, data)
    says(said, "data.0.weight = -1")
    says(said, "data.1.path", "no such folder")
    says(said, "data.2.wieght", "unknown key")
    says(said, "data.2.weight", "missing")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("longer", "geometry.max_tokens is 20, not 16"), ("other", "tokenizer is"), ("sentences", "content.kind is")],
)
def test_corpora_that_were_prepared_otherwise_are_refused(corpora, tmp_path, name, reason):
    config = runs.train_config(several(corpora["one"], corpora[name]), tmp_path / "run")
    says(problems(config), "data.1.path", corpora[name], corpora["one"], reason, "prepare both alike")


def test_a_copy_of_a_corpus_is_refused(corpora, tmp_path):
    shutil.copytree(corpora["one"], tmp_path / "copy")
    for place in (tmp_path / "copy", f"{corpora['one']}/../out"):
        config = runs.train_config(several(corpora["one"], place), tmp_path / "run")
        says(problems(config), "data.1.path", "holds the same shards as", "data.0.path")


def test_a_batch_that_repeats_documents_of_a_small_corpus_is_refused(corpora, tmp_path):
    data = several(corpora["one"], corpora["two"], weights=[4, 1])
    found = problems(runs.train_config(data, tmp_path / "run", batch_documents=70))
    says(found, "batch_documents = 70", "57 rows of", corpora["one"])
    fewer = problems(runs.train_config(data, tmp_path / "run", batch_documents=16, data_fraction=0.1))
    says(fewer, "data_fraction = 0.1", corpora["one"], "14", "increase it")


def local_values(corpora, run, **changes):
    data = several(corpora["one"], corpora["two"])
    scaling = {"num_workers": 0, "elastic_determinism": True}
    kept = {"every_steps": 4, "keep_last": 3}
    validation = {"every_steps": 4}
    changes = {"steps": 12, "validation": validation, "checkpoint": kept, "scaling": scaling, **changes}
    return runs.train_config(data, run, **changes)


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    """A run on two corpora in this process."""
    run = tmp_path_factory.mktemp("mixture") / "run"
    run_training(local_values(corpora, run))
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
    values = local_values(corpora, tmp_path / "run").model_dump(mode="json")
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump({"train": values}))
    assert main(["train", str(config), "--plan"]) == 0
    sizes = ShardSet(corpora["one"], "train", others=[corpora["two"]]).sizes
    passes = f"{77 / sizes[0]:,.3g} pass(es) over its {sizes[0]}"
    says(capsys.readouterr().out, corpora["one"], "80.0% of the rows", passes)


@pytest.mark.slow
def test_run_with_other_weights_or_corpora_is_refused(corpora, trained):
    other = several(corpora["one"], corpora["two"], weights=[1, 1])
    turned = several(corpora["two"], corpora["one"])
    for data, told in ((other, ("data.weight", "[4, 1]")), (turned, ("other shards", "data.0.path"))):
        changed = {"data": runs.least_config(data=data).data}
        says(problems(local_values(corpora, trained).model_copy(update=changed)), told)
