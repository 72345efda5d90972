"""Items and their settings, starts and plans; comparisons over seeds against SciPy; layers of an encoder."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from encoderfiles import keys
from folders import encoder_folder
from papers import arguments, changed, refusal, write_item
from scipy import stats
from transformers import AutoModel, AutoTokenizer

from declutr.cli.main import main
from declutr.common.bootstrap import item_errors
from declutr.common.config import flat_keys
from declutr.common.errors import UsageError
from declutr.encoders.loading import load_encoder
from declutr.reproduction import lower_layers
from declutr.reproduction.item import item_names, load_item
from declutr.reproduction.plan import ItemPlan
from declutr.reproduction.table import compare_labels, difference_row
from declutr.trainer.step.config import OptimConfig

NAMES = item_names()
SCALES = [(name, scale) for name in NAMES for scale in load_item(name).scales]


def plan(folder, item, scale="tiny", words=(), seeds=(0,), **options):
    item = load_item(item) if isinstance(item, str) else item
    places = folder / "data", folder / "senteval", folder / "work"
    return ItemPlan("an-item", item, scale, *places, words, seeds, **options)


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_item_has_valid_runs(tmp_path, name, scale):
    runs = plan(tmp_path, name, scale, seeds=None).runs
    trained = [run.config for run in runs if run.config]
    assert runs
    assert "$" not in str([config.model_dump() for config in trained])
    if scale == "tiny":
        assert len({run.seed for run in runs}) >= 3
        assert all(config.scaling.local and (config.epochs or config.steps >= 300) for config in trained)
    settings = [(config.data, config.resume_settings()) for config in trained]
    assert all(other not in settings[:number] for number, other in enumerate(settings))


def test_at_least_ten_items_of_which_five_are_tiny_print_means_of_the_printed_tasks():
    assert len(NAMES) >= 10
    tiny = {name for name, scale in SCALES if scale == "tiny"}
    assert tiny >= {"declutr-figure2", "declutr-figure3", "scd-table3", "scl-tables5-7", "simcse-dropout"}
    means = dict.fromkeys(("visualcse-table1", "visualcse-table4", "audiocse-table2", "nonling-table6"), ("Avg.", "S"))
    means |= {f"scl-tables{number}": ("STS", "ST") for number in ("2-3", "4-6", "5-7")}
    for name, (column, start) in means.items():
        for numbers in load_item(name).printed.values():
            names = [task for task in numbers if task.startswith(start) and task not in (column, "SUBJ")]
            tasks = [numbers[task] for task in names]
            tasks = tasks[:5] if column == "STS" else tasks
            assert sum(tasks) / len(tasks) == pytest.approx(numbers[column], abs=0.02)


def test_siblings_differ_from_their_controls_in_one_setting(tmp_path):
    runs = plan(tmp_path, "siblings").runs
    runs = {run.cell: flat_keys(run.config.model_dump(mode="json")) for run in runs if run.config}
    rates = {"optim.lr"}  # a control has its method's
    for method, control, differing in (
        ("SCD", "SCD without repulsion", {"objective.repulsion_weight"}),
        ("SimCSE", "SimCSE with equal views", {"objective.equal_views"}),
        ("SimCSE", "SimCSE on hypotheses", {"data"} | rates),
        ("SimCSE on hypotheses", "SimCSE supervised", {"data", "objective.supervised"}),
        ("SCL", "SCL cross entropy alone", {"objective.contrastive_weight"}),
        ("DeCLUTR", "MLM", {"objective.terms", "encoder.new_mlm_head"} | rates),
    ):
        keys = runs[method].keys() | runs[control].keys()
        changed = {key for key in keys if runs[method].get(key) != runs[control].get(key)}
        assert changed == differing | {"run"}, method


def test_simcse_from_an_encoder_without_dropout_has_some(tmp_path):
    rates = {run.cell: run.config.encoder.dropout for run in plan(tmp_path, "mlm-start").runs if run.config}
    assert rates.pop("SimCSE") == 0.1
    assert set(rates.values()) == {None}


@pytest.mark.parametrize("name", ["work", 'Größe "1" 😀'])
def test_other_start_replaces_the_start_and_a_part_needs_its_own_shards_alone(tmp_path, name):
    start, folder = tmp_path / "start", tmp_path / name
    start.mkdir()
    own, other = plan(folder, "siblings"), plan(folder, "siblings", start=start)
    part = plan(folder, "siblings", start=start, only=["start", "SCL"])
    assert (own.start.data, other.start) == (own.shards["tiny-documents"].output, None)
    assert own.shards.keys() - other.shards.keys() == {"tiny-documents"}
    assert {run.config.encoder.pretrained if run.config else run.encoder.name for run in other.runs} == {str(start)}
    assert [run.cell for run in part.runs] == ["start", "SCL"]
    assert set(part.shards) == {"siblings-pairs"}
    assert part.runs[1].config.run == str(folder / "work/an-item-tiny/SCL-0/run")


def test_figure_2_has_as_many_spans_with_one_anchor_as_with_two(tmp_path):
    for scale in ("tiny", "paper"):
        configs = {run.labels.get("anchors"): run.config for run in plan(tmp_path, "declutr-figure2", scale).runs[::-1]}
        (anchors, rows), (more, fewer) = (
            (configs[label].spans.num_anchors, configs[label].batch_documents) for label in ("A=1", "A=2")
        )
        assert rows == 2 * fewer
        assert anchors * rows == more * fewer


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return write_item(tmp_path_factory.mktemp("item"))


TERMS = {"both": {}, "mlm": {"objective.terms": "mlm"}}


@pytest.mark.parametrize(("change", "parts"), [
    ({"axes": {"terms": {"both": {"objective.term": "both"}}}}, ["objective.term", "unknown key"]),
    ({"axes": {"temperature": {"0": {"objective.loss.temperature": 0}}}}, ["temperature", "0"]),
    ({"axis": {}}, ["axis", "unknown key"]),
    ({"axes": {"rate": {0.001: {}}}}, ["axes.rate: the key 0.001 must be text", "quotes"]),
    ({"axes": {}}, ["axes or encoders"]),
    ({"pairs": [["both", "mml"]]}, ["pairs", "mml", "did you mean `mlm`"]),
    ({"pairs": [["both", "50%"]]}, ["pairs", "both and 50%", "two axes"]),
    ({"axes": {"terms": {}}}, ["axes.terms", "no label"]),
    ({"axes": {"a": {"x": {}}, "b": {"x": {}}}}, ["axes.b.x", "the axis a has this label"]),
    ({"axes": {"a": {"x": {"steps": 3}}, "b": {"y": {"steps": 4}}}}, ["axes.b.y.steps", "axis a"]),
    ({"axes": {"a": {"x": {"steps": 3}}, "b": {"y": {}}},
      "scales": {"tiny": {"config": "c.yaml", "axes": {"b": {"z": {"steps": 4}}}}}}, ["axes.b.z.steps", "axis a"]),
    ({"printed": {"both, 10%": {"STS-B": 1.0}}}, ["both, 10%", "no run of the item"]),
    ({"columns": {"A": {"tasks": ["STS99"]}}}, ["STS99"]),
    ({"columns": {"A": {"tasks": ["STS12"], "mean_of": ["B"]}}}, ["one of tasks"]),
    ({"columns": {"A": {"mean_of": ["B"]}}}, ["columns.A.mean_of.B", "no column with tasks"]),
    ({"axes": {"a": {"b": {"encoder": {"trust_remote_code": True}}}}},
     ["axes.a.b.encoder.trust_remote_code", "cannot be granted by a file"]),
    ({"scales": {"paper": {"config": "configs/declutr-small.yaml"}}}, ["no scale tiny", "paper"]),
])  # fmt: skip
def test_wrong_item_is_refused_before_anything_starts(own, tmp_path, capsys, change, parts):
    line = refusal(capsys, *arguments(changed(own, "wrong", **change), tmp_path / "work"))
    assert [part for part in parts if part not in line] == []
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("words", "part"), [
    *[(["run=elsewhere"], "--work"), (["seed=3"], "--seeds"), (["steps"], "key=value")],
    (["stepps=3"], "did you mean `steps`"),
    (["objective.terms=both"], "objective.terms cannot be changed for all runs"),
    (["objective={terms: both}"], "which differ in objective.terms"),
    (["--only", "boht"], "did you mean `both`"), (["--only", "foo"], "--only foo: no label of "),
    *[(["--seeds", "3,3"], "give each label and seed once"), (["--seeds=-1"], "seed = -1")],
    *[(["--start", "configs"], "config.json"), (["--work", __file__], "is a file; name a folder")],
])  # fmt: skip
def test_wrong_setting_is_refused(own, tmp_path, capsys, words, part):
    assert part in refusal(capsys, *arguments(own, tmp_path / "work", *words))


def test_plan_names_cells_seeds_steps_and_rows_and_runs_nothing(own, tmp_path, capsys):
    assert main(["reproduce", *arguments(own, tmp_path / "work", "--plan", "steps=3", "--seeds", "4,5,6")]) == 0
    text = capsys.readouterr().out
    parts = ("12 (4 cells, seeds [4, 5, 6]), 0 finished", "3 steps x 8 rows = 24", "of 50%", "12 runs left: ")
    assert [part for part in parts if part not in text] == []
    assert not (tmp_path / "work").exists()
    assert "did you mean `scd-table3`" in refusal(capsys, "scd-tabel3", "--plan")
    assert "trains nothing" in refusal(capsys, "declutr-tableS1", "steps=3", "--work", tmp_path)


def with_settings(own, settings, axes):
    scale = {"settings": settings}
    if "encoder" in settings:
        scale["start"] = {"config": str(own.parent / "train.yaml")}
    return load_item(str(changed(own, "changed", scale, axes=axes)))


def start_folder(folder, **options):
    (folder / "start").mkdir()
    return encoder_folder(folder / "start", "bert", **options)


STARTING = {"encoder": {"pretrained": "$DECLUTR_START"}}


@pytest.mark.parametrize(("settings", "words", "expected"), [
    ({"steps": None, "epochs": 1}, ["steps=3"], {"steps": 3, "epochs": None}),
    ({"steps": 5}, ["epochs=2"], {"steps": None, "epochs": 2}),
    ({"steps": None, "epochs": 1}, ["epochs=2"], {"steps": None, "epochs": 2}),
    ({"optim.lr": 0.5, "optim.weight_decay": 0.3}, ["optim={lr: 0.25}"], {"optim": OptimConfig(lr=0.25)}),
])  # fmt: skip
def test_steps_and_sections_of_the_command_replace_those_of_the_item(own, tmp_path, settings, words, expected):
    runs = plan(tmp_path, with_settings(own, settings, {"terms": TERMS}), words=words).runs
    assert all({key: getattr(run.config, key) for key in expected} == expected for run in runs)
    axes = {"anchors": {"A=1": {"epochs": 2}, "A=2": {}}}
    with pytest.raises(UsageError, match=r"steps cannot be changed for all runs, which differ in epochs"):
        plan(tmp_path, with_settings(own, {"steps": 4}, axes), words=["steps=3"])


def test_start_is_scored_with_the_pooling_that_all_runs_share(own, tmp_path):
    start = start_folder(tmp_path, pooling="cls", prompts={"query": "find: "})
    for first, second, expected in (("mean", "mean", "mean"), ("max", "max", "max"), ("mean", "cls", None)):
        axes = {"axis": {"a": {"encoder.pooling": first}, "b": {"encoder.pooling": second}}}
        item = with_settings(own, STARTING, axes)
        for only in ([], ["start"]):
            run, *_ = plan(tmp_path, item, start=start, only=only).runs
            assert (run.cell, run.encoder.name, run.encoder.pooling) == ("start", str(start), expected)
    with pytest.raises(UsageError, match="takes no --start"):
        plan(tmp_path, str(own), start=start)
    keys("config_sentence_transformers.json", default_prompt_name="query")(start)
    item = with_settings(own, STARTING, {"axis": {"a": {}, "b": {"optim.lr": 0.5}}})
    with pytest.raises(UsageError, match=f"--start {start}: puts 'find: ' before each text"):
        plan(tmp_path, item, start=start)


CELLS = {f"{a}, {b}": {"terms": a, "share": b} for a in ("both", "mlm") for b in ("all", "half")}
START, SEEDS = {"start": {}}, range(5)


def numbers(effect=1.0):
    """Numbers that depend mostly on the seed, as those of runs with the same documents do."""
    rng = np.random.default_rng(0)
    luck = 10 * rng.standard_normal(5)
    columns = {name: luck + effect * (cell["terms"] == "both") + rng.standard_normal(5) for name, cell in CELLS.items()}
    return {name: dict(enumerate(map(float, values))) for name, values in columns.items()}


def averaged(*arguments):
    return [row for row in compare_labels(*arguments) if not row.within]


@pytest.mark.parametrize("within", ["", "all", "half"])
def test_labels_are_compared_as_by_a_paired_t_test_also_within_each_label_of_the_other_axis(within):
    column, rows = numbers(), compare_labels(CELLS, numbers())
    compared = [(row.axis, row.label, row.base, row.seeds) for row in rows if not row.within]
    assert compared == [("terms", "mlm", "both", 5), ("share", "half", "all", 5)]
    assert len(rows) == 6
    (row,) = (row for row in rows if (row.label, row.within) == ("mlm", within))
    shares = [within] if within else ["all", "half"]
    sides = [[list(column[f"{terms}, {share}"].values()) for share in shares] for terms in ("mlm", "both")]
    mlm, both = np.mean(sides, axis=1)
    expected = stats.ttest_rel(mlm, both)
    interval = expected.confidence_interval(0.95)
    assert row.difference == pytest.approx((mlm - both).mean())
    assert row.p == pytest.approx(expected.pvalue)
    assert row.interval == pytest.approx((interval.low, interval.high))
    assert [compare_labels(CELLS, numbers(effect=effect))[0].measurable for effect in (20.0, 0.0)] == [True, False]


def test_the_interval_holds_other_test_items_too():
    """A difference seen with each seed alike is not measurable if it rests on few questions."""
    column = numbers(effect=1.0)
    answers = np.random.default_rng(1).random((2, 50)) < np.array([[0.5], [0.52]])
    errors = [item_errors(side.astype(float)).tolist() for side in answers]
    items = {name: dict.fromkeys(SEEDS, errors[cell["terms"] == "both"]) for name, cell in CELLS.items()}
    alone, both = compare_labels(CELLS, column)[0], compare_labels(CELLS, column, (), items)[0]
    assert (alone.items, both.items, both.difference) == (0, 50, alone.difference)
    widths = [row.interval[1] - row.interval[0] for row in (alone, both)]
    of_items = np.sqrt(np.square(np.subtract(*errors)).sum())
    assert widths[1] > 2 * 1.9 * of_items > widths[0]
    assert both.p > alone.p
    assert difference_row(both).endswith("| 50 |")
    del items["mlm, half"][2]
    assert compare_labels(CELLS, column, (), items)[0] == alone, "a run without items: seeds alone"


def test_only_seeds_and_combinations_that_both_labels_have_are_compared():
    """Else the other axes' effects would count as those of the label."""
    column = numbers()
    first, second = averaged({name: cell for name, cell in CELLS.items() if name != "both, half"}, column)
    pairs = zip(column["mlm, all"].values(), column["both, all"].values(), strict=True)
    assert first.difference == pytest.approx(np.mean([mlm - both for mlm, both in pairs]))
    assert (first.label, second.label) == ("mlm", "half")
    assert compare_labels({name: CELLS[name] for name in ("both, all", "mlm, half")}, column) == []
    three = {name: cell | {"third": "x"} for name, cell in CELLS.items()}
    assert [row.within for row in compare_labels(three, column)] == ["", ""]
    del column["mlm, half"][3]
    assert [row.seeds for row in averaged(CELLS, column)] == [4, 4]
    column["both, all"] = {}
    assert averaged(CELLS, column) == []
    rows = averaged(START | CELLS, numbers() | {"start": dict.fromkeys(SEEDS, 7.0)})  # every label is
    assert [(row.axis, row.label, row.base) for row in rows] == [
        *[("terms", "mlm", "both"), ("terms", "both", "start"), ("terms", "mlm", "start")],
        *[("share", "half", "all"), ("share", "all", "start"), ("share", "half", "start")],
    ]
    assert [row for row in rows if row.base != "start"] == averaged(CELLS, numbers())
    known = averaged({"words": {"": "words"}} | CELLS, numbers() | {"words": dict.fromkeys(SEEDS, 7.0)})
    assert [replace(row, base=row.base.replace("words", "start")) for row in known] == rows
    gains = {row.label: row.difference for row in rows if row.base == "start"}
    assert gains["mlm"] - gains["both"] == pytest.approx(rows[0].difference)


@pytest.mark.parametrize("effect", [0.0, 0.1, 40.1])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_few_numbers_or_equal_differences_have_neither_interval_nor_p(seeds, effect):
    """Differences that are equal but for rounding, such as 0.3 - 0.2 and 0.2 - 0.1, vary by nothing."""
    gains = {name: effect * (cell["terms"] == "mlm") for name, cell in CELLS.items()}
    equal = {name: {seed: 0.1 * seed + gain for seed in range(seeds)} for name, gain in gains.items()}
    row = compare_labels(CELLS, equal)[0]
    assert row.difference == pytest.approx(effect)
    assert (row.p, row.interval, row.measurable) == (None, None, False)
    assert ("(one seed)" if seeds == 1 else "(not measurable)") in difference_row(row)


@pytest.mark.parametrize(("pairs", "without", "expected"), [
    ([("second", "third"), ("second", "of a cell that is not run")], "", [("second", "third", 0.75)]),
    ([("second", "third")], "third", []),
    ([("of another", "axis")], "", [("second", "first", 2.0), ("third", "first", 1.25)]),
])  # fmt: skip
def test_pairs_of_an_axis_are_compared_in_place_of_its_first_label(pairs, without, expected):
    cells = START | {name: {"method": name} for name in ("first", "second", "third") if name != without}
    values = {"start": (1.0, 1.0), "first": (2.0, 1.0), "second": (3.0, 4.0), "third": (2.5, 3.0)}
    column = {name: dict(enumerate(pair)) for name, pair in values.items()}
    rows = [(row.label, row.base, row.difference) for row in compare_labels(cells, column, pairs)]
    gains = [("first", "start", 0.5), ("second", "start", 2.5), ("third", "start", 1.75)]
    assert rows == expected + [row for row in gains if row[0] != without]


def test_lower_layers_are_those_of_the_source(tmp_path, capsys):
    source = start_folder(tmp_path)
    lower_layers.main([str(source), "1", str(tmp_path / "new")])
    whole, cut = AutoModel.from_pretrained(source), AutoModel.from_pretrained(tmp_path / "new")
    assert cut.config.num_hidden_layers == len(cut.encoder.layer) == 1
    theirs = whole.state_dict()
    assert all(value.equal(theirs[name]) for name, value in cut.state_dict().items())
    table = whole.get_input_embeddings().weight
    ids = AutoTokenizer.from_pretrained(source)("a b c", add_special_tokens=False)["input_ids"]
    means = load_encoder(f"words:{source}")
    assert torch.allclose(torch.from_numpy(means.encode(["a b c"])[0]), table[ids].mean(dim=0), atol=1e-6)
    assert means.fingerprint == load_encoder(f"words:{tmp_path / 'new'}").fingerprint, "layers have no part in it"
    for folder, layers, target, parts in (
        (source, 9, "nine", ("9 layers", "has 2")), (tmp_path / "none", 1, "other", ("none has no config.json",)),
        (source, 1, "new", ("new exists already",)),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            lower_layers.main([str(folder), str(layers), str(tmp_path / target)])
        message = capsys.readouterr().err
        assert [part for part in parts if part not in message] == []
    assert {path.name for path in tmp_path.iterdir()} == {"start", "new"}
