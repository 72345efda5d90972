"""Several corpora in one task: shares, order, settings and their problems, a run; the rows that a validation scores."""

import json
import random
import shutil

import numpy as np
import pytest
import tinyruns as runs
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from preparing import make_pair, prepare_rows
from textruns import LABELS, SCL, write_texts
from tinyruns import problems

from declutr.cli.main import main
from declutr.common.errors import CheckpointError, TrainingFailedError
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.report.runs import write_runs_page
from declutr.trainer.checkpoints.checkpoint import steps_in
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.plan import MOST_TURNS, Plan, turns, whole_shares
from declutr.trainer.driver import estimate
from declutr.trainer.driver.checks import corpora_remarks, resolve
from declutr.trainer.driver.supervisor import Signals, Supervisor
from declutr.trainer.objectives.scores import held_out_rows
from declutr.trainer.train import run_training

LOCAL = {"num_workers": 0}


def texts(seed, number):
    rng = random.Random(seed)
    return [" ".join(rng.choices("abcdefghij", k=rng.randint(90, 200))) for _ in range(number)]


def shards(folder, seed=1, number=60, rows=None, kind="documents", **settings):
    """Documents of the seed, with one tokenizer for all seeds."""
    rows = [{"text": text} for text in rows or texts(seed, number)]
    spans = {"geometry": runs.GEOMETRY} if kind == "documents" else {}
    return prepare_rows(folder, kind, rows, **{"texts": texts(0, 50), "validation_fraction": 0.1} | spans | settings)[0]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two folders of documents, one with other spans, one with another tokenizer, one of sentences."""
    top = tmp_path_factory.mktemp("corpora")
    return {
        "one": shards(top / "one"),
        "two": shards(top / "two", 2, 90),
        "longer": shards(top / "longer", 3, 20, geometry=runs.GEOMETRY | {"max_tokens": 20}),
        "other": shards(top / "other", 4, 40, texts=[text.upper() for text in texts(5, 50)]),
        "sentences": shards(top / "sentences", 6, 40, kind="sentences"),
    }


@pytest.fixture(scope="module")
def data(corpora):
    return corpora["one"]


def several(*folders, weights=(2, 0.5)):
    return [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights, strict=False)]


def refused(tmp_path, capsys, data):
    """What `declutr train` says about this setting; Ray is never started."""
    values = runs.train_values("data", tmp_path / "run") | {"data": data}
    assert main(["train", str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    return capsys.readouterr().err


shares = st.lists(st.integers(1, 60), min_size=2, max_size=6).map(whole_shares)


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
    message = refused(tmp_path, capsys, [*data, {"path": "x", "wieght": 2}, str(tmp_path / "gone")])
    problems = {"0.weight": "= -1", "1.path": "no such folder", "2.wieght": "unknown key", "2.weight": "missing"}
    problems["3.path"] = "no such folder"
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
        ({"batch_documents": 80}, ("batch_documents = 80", "65 rows of")),
        ({"batch_documents": 16, "data_fraction": 0.1}, ("data_fraction = 0.1", "14", "increase it")),
    ):
        says(problems(runs.train_config(data, tmp_path / "run", **changes)), facts, corpora["one"])


def local_values(corpora, run):
    data = several(corpora["one"], corpora["two"])
    scaling, checkpoint = LOCAL | {"elastic_determinism": True}, {"every_steps": 4, "keep_last": 3}
    return runs.train_values(data, run, steps=12, validation={"every_steps": 4}, checkpoint=checkpoint, scaling=scaling)


@pytest.mark.slow
def test_run_on_two_corpora_logs_the_rows_of_each_and_is_refused_with_others(corpora, tmp_path, capsys):
    trained = tmp_path / "run"
    run_training(TrainConfig.model_validate(local_values(corpora, trained)))
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
    says(write_runs_page([trained]).read_text(), str(corpora["one"]), "80.21%")
    card = (trained / "export" / "README.md").read_text()
    says(card, "corpus 2 (out)", "20.0% of the rows", "19 in 12 steps")
    assert str(corpora["two"]) not in card
    other = several(corpora["one"], corpora["two"], weights=[1, 1])
    turned = several(corpora["two"], corpora["one"])
    for data, facts in ((other, ("data.weight", "[4, 1]")), (turned, ("other shards", "data.0.path"))):
        says(problems(TrainConfig.model_validate(local_values(corpora, trained) | {"data": data})), facts)


@pytest.mark.slow
def test_plan_counts_the_passes_of_each_corpus(corpora, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "_SECONDS", 0.5)
    config = runs.write_config(tmp_path / "train.yaml", train=local_values(corpora, tmp_path / "run"))
    assert main(["train", str(config), "--plan"]) == 0
    sizes = ShardSet(corpora["one"], "train", others=[corpora["two"]]).sizes
    passes = f"{77 / sizes[0]:,.3g} pass(es) over its {sizes[0]}"
    says(capsys.readouterr().out, corpora["one"], "80.0% of the rows", passes)


def with_validation(trained, run, **places):
    validation = {"every_steps": 2} | {key: str(place) for key, place in places.items()}
    return runs.train_config(trained, run, steps=2, scaling=LOCAL, validation=validation)


@pytest.mark.slow
def test_moved_rows_continue_a_run_and_other_rows_in_their_place_are_refused(data, tmp_path):
    """A run that validates on other shards and on judged pairs."""
    top = tmp_path / "finished"
    top.mkdir()
    write_texts(top)
    config = with_validation(data, top / "run", data=shards(top / "other", 2, validation_fraction=0.0), stsb=top)
    run_training(config)
    moved = shutil.copytree(top, tmp_path / "moved")
    places = {"data": moved / "other" / "out", "stsb": moved}
    assert problems(with_validation(data, top / "run", **places)) == []

    pairs = (moved / "sts-dev.csv").read_text()
    (moved / "sts-dev.csv").write_text(pairs.replace("\t4.", "\t3."))
    says(problems(with_validation(data, top / "run", **places)), "validation.stsb was", "another configuration")
    (moved / "sts-dev.csv").write_text("nothing")
    (only,) = problems(with_validation(data, top / "run", **places))
    says(only, "validation.stsb", "line 1")

    places["stsb"] = top
    shutil.rmtree(moved / "other")
    shards(moved / "other", seed=3, validation_fraction=0.0)
    says(problems(with_validation(data, top / "run", **places)), "validation.data was", "another configuration")
    assert problems(config) == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"geometry": {"num_anchors": 2, "max_tokens": 8}}, ("spans.max_tokens = 16", "at most 8")),
        ({"short_documents": "shrink_spans"}, ("short_documents = shrink_spans", "with drop", "prepare both alike")),
        ({"geometry": {"num_anchors": 1, "max_tokens": 16}}, ()),
    ],
)
def test_other_shards_that_the_spans_do_not_fit_are_refused_by_name(data, tmp_path, settings, told):
    other = shards(tmp_path / "other", seed=2, validation_fraction=0.0, **settings)
    found = problems(with_validation(data, tmp_path / "run", data=other))
    if told:
        says(found, f"validation.data = {other}", *told)
    else:
        assert found == [], "a validation draws one anchor"


def test_shards_that_are_trained_on_too_or_lack_a_file_are_named_before_the_start(data, tmp_path):
    other = shards(tmp_path / "other", seed=2, validation_fraction=0.0)
    config = with_validation(data, tmp_path / "run", data=other)
    task = {"more": {"data": str(other), "batch_documents": 8, "spans": config.spans.model_dump()}}
    both = type(config).model_validate(config.model_dump() | {"auxiliary_tasks": task})
    says(problems(both), f"validation.data = {other}", "rows that the run trains on")
    shard = next(other.rglob("*.arrow"))
    shard.unlink()
    says(problems(config), "validation.data", shard.name, "missing")


def test_place_that_cannot_be_expanded_is_named_with_its_setting_and_all_others(data, tmp_path):
    for place in ("$UNSET_SHARDS/val", ""):
        found = problems(with_validation(data, tmp_path / "run", data=place, stsb="$UNSET_PAIRS"))
        says(found, f"validation.data = {place}: ")
        says(found, "validation.stsb = $UNSET_PAIRS", "is not set")


def test_run_without_a_checkpoint_takes_other_settings_unless_it_has_finished(data, tmp_path):
    """Its loss was not finite in the first steps, and the message says to lower the rate."""
    run = tmp_path / "run"
    with pytest.raises(TrainingFailedError, match=r"optim\.lr"):
        run_training(runs.train_config(data, run, optim={"lr": 1e30}, steps=4, scaling=LOCAL))
    assert not list((run / "checkpoints").glob("step-*"))
    config = runs.train_config(data, run, steps=2, scaling=LOCAL, checkpoint={"every_steps": 1})
    assert run_training(config)["steps"] == 2
    shutil.rmtree(run / "checkpoints")
    files = [run / name for name in ("metrics.jsonl", "config.yaml", "resume_settings.json")]
    before = [path.read_bytes() for path in files]
    for settings in (config, config.model_copy(update={"seed": 5})):
        with pytest.raises(CheckpointError, match="has finished"):
            run_training(settings)
    assert [path.read_bytes() for path in files] == before


def test_copies_in_several_corpora_are_scored_once(tmp_path):
    corpora = {"first": texts(5, 40), "second": texts(5, 40) + texts(6, 20)}
    places = [shards(tmp_path / name, rows=rows, validation_fraction=0.5) for name, rows in corpora.items()]
    held_out = ShardSet(places[0], "held-out", others=places[1:])
    rows = held_out_rows(held_out, 1000, seed=3)
    keys = document_keys(held_out.take(rows))
    assert len(np.unique(keys)) == len(keys)
    assert set(keys) == set(document_keys(held_out.take(np.arange(held_out.num_documents))))
    assert len(rows) < held_out.num_documents


def test_corpora_that_meet_themselves_or_hold_out_other_texts_are_named(tmp_path):
    small = shards(tmp_path / "small", seed=7, number=30)
    other = shards(tmp_path / "other", seed=8, number=200, validation_fraction=0.0)
    corpora = [str(small), {"path": str(other), "weight": 1}]  # a name alone has the weight 1
    run = resolve(runs.train_config(corpora, tmp_path / "run", steps=40, validation={"every_steps": 5}))
    found = list(corpora_remarks(run, 40))
    assert len(found) == 2
    says(found[0], small, "training documents", "a batch reads 4", "lower batch_documents")
    says(found[1], other, "validation_fraction = 0.0", f"{small} with 0.1")
    assert len(list(corpora_remarks(run, 2))) == 1, "no corpus is read twice"


@pytest.mark.slow
def test_a_share_counts_the_rows_that_it_reads(tmp_path, capsys):
    more, part = shards(tmp_path / "more", seed=9, number=100), tmp_path / "part"
    share = runs.train_values(more, part, steps=2, scaling=LOCAL, data_fraction=0.5)
    run_training(TrainConfig.model_validate(share))
    total, read = (ShardSet(more, "train", part=rows).num_documents for rows in (None, (0.5, 0)))
    says((part / "export" / "README.md").read_text(), f"{read} of {total} training documents")
    path = runs.write_config(tmp_path / "share.yaml", train=share | {"run": str(tmp_path / "planned")})
    assert main(["train", str(path), "--plan"]) == 0
    says(capsys.readouterr().out, f"pass(es) over {read}")


@pytest.mark.slow
def test_score_that_the_rows_do_not_have_ends_the_run_at_its_first_validation(tmp_path):
    rows = [make_pair(f"premise {n // 2}", f"hypothesis {n}", LABELS[1 + n % 2]) for n in range(120)]
    pairs, _ = prepare_rows(tmp_path / "pairs", {"kind": "pairs"}, rows)
    changes = {"export": "best", "validation": {"every_steps": 2, "score": "recall_at_1"}}
    config = runs.train_config(pairs, tmp_path / "run", objective=SCL, scaling=LOCAL, **changes)
    assert problems(config) == []
    with pytest.raises(TrainingFailedError, match="recall_at_1"):
        run_training(config)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_what_changes_while_a_run_is_up_ends_it_and_costs_no_checkpoint(data, tmp_path):
    """As if a worker died, and the next one found something else: it would begin again at step 0."""
    write_texts(tmp_path)
    own, pairs = shutil.copytree(data, tmp_path / "data"), tmp_path / "sts-dev.csv"
    config, before = with_validation(own, tmp_path / "run", stsb=tmp_path), pairs.read_text()
    run_training(config)
    plan = resolve(config)
    for place in ("validation.stsb", own):
        pairs.write_text(before.replace("\t4.", "\t3.") if place != own else before)
        if place == own:
            shutil.rmtree(own)
            shutil.copytree(shards(tmp_path / "new", seed=4), own)
        with pytest.raises(TrainingFailedError, match=f"{place} on .* differ"):
            Supervisor(plan, Signals(), 0.0, None).run_to_end()
        assert steps_in(tmp_path / "run" / "checkpoints") == [2]


def test_export_outlives_its_checkpoint(data, tmp_path, log):
    """The best checkpoint breaks after the end of the run; the second best does not replace its encoder."""
    best = {"validation": {"every_steps": 1}, "export": "best", "checkpoint": {"every_steps": 1, "keep_last": 4}}
    config = runs.train_config(data, tmp_path / "run", steps=4, scaling=LOCAL, **best)
    step, weights = run_training(config)["exported_step"], tmp_path / "run" / "export" / "model.safetensors"
    before = weights.read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    assert run_training(config)["exported_step"] == step
    assert weights.read_bytes() == before
    assert any(f"step {step}, which is gone" in line for line in log)
