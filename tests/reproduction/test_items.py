"""Items and their settings, starts and plans; comparisons over seeds against SciPy; layers of an encoder."""

import numpy as np
import pytest
import yaml
from folders import encoder_folder
from messages import all_of
from papers import arguments, write_item
from scipy import stats
from transformers import AutoModel

from declutr.cli.main import main
from declutr.common.config import flat_keys
from declutr.common.errors import UsageError
from declutr.reproduction import lower_layers
from declutr.reproduction.item import Cell, item_names, load_item, plan_item
from declutr.reproduction.table import compare_labels, difference_row
from declutr.trainer.step.config import OptimConfig

NAMES = item_names()
SCALES = [(name, scale) for name in NAMES for scale in load_item(name).scales]


def places(folder):
    return folder / "data", folder / "senteval", folder / "work"


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_item_has_valid_runs(tmp_path, name, scale):
    plan = plan_item(name, load_item(name), scale, *places(tmp_path), {}, None)
    assert plan.runs
    assert "$" not in str([run.config and run.config.model_dump() for run in plan.runs])
    if scale == "tiny":
        assert len({run.seed for run in plan.runs}) >= 3
        trained = [run for run in plan.runs if run.config]
        assert all(run.config.scaling.local for run in trained)
        assert all(run.config.epochs or run.config.steps >= 300 for run in trained)
    same = [run.config for run in plan.runs if run.config and run.seed == plan.runs[0].seed]
    changed = [(config.data, config.resume_settings() | {"seed": 0}) for config in same]
    assert all(one != other for number, one in enumerate(changed) for other in changed[:number])


def test_there_are_at_least_ten_items_of_which_five_have_a_tiny_scale():
    assert len(NAMES) >= 10
    tiny = {name for name, scale in SCALES if scale == "tiny"}
    assert tiny >= {"declutr-figure2", "declutr-figure3", "scd-table3", "scl-tables5-7", "simcse-dropout"}


@pytest.mark.parametrize(("name", "column"), [("scl-tables5-7", "STS"), ("visualcse-table4", "Avg.")])
def test_printed_means_are_those_of_the_printed_tasks(name, column):
    tasks = [task for task in load_item(name).printed["t=1.0" if "scl" in name else "BERT, SupCon"] if task != column]
    tasks = [task for task in tasks if task.startswith("ST" if "scl" in name else "S")]
    for numbers in load_item(name).printed.values():
        assert sum(numbers[task] for task in tasks) / len(tasks) == pytest.approx(numbers[column], abs=0.02)


def test_siblings_differ_from_their_controls_in_one_setting(tmp_path):
    plan = plan_item("siblings", load_item("siblings"), "tiny", *places(tmp_path), {}, [0])
    runs = {run.cell.name: flat_keys(run.config.model_dump(mode="json")) for run in plan.runs if run.config}
    rates = {"optim.lr"}  # a control has its method's
    for one, other, differing in (
        ("SCD", "SCD without repulsion", {"objective.repulsion_weight"}),
        ("SimCSE", "SimCSE with equal views", {"objective.equal_views"}),
        ("SimCSE", "SimCSE on hypotheses", {"data"} | rates),
        ("SimCSE on hypotheses", "SimCSE supervised", {"data", "objective.supervised"}),
        ("SCL", "SCL cross entropy alone", {"objective.contrastive_weight"}),
        ("DeCLUTR", "MLM", {"objective.terms", "encoder.new_mlm_head"} | rates),
    ):
        found = {key for key in runs[one].keys() | runs[other].keys() if runs[one].get(key) != runs[other].get(key)}
        assert found == differing | {"run"}, one


def test_given_start_replaces_the_start_and_its_shards(tmp_path):
    item, start = load_item("siblings"), tmp_path / "start"
    start.mkdir()
    own = plan_item("siblings", item, "tiny", *places(tmp_path), {}, [0])
    given = plan_item("siblings", item, "tiny", *places(tmp_path), {}, [0], start)
    assert (own.start.data, given.start) == (own.shards["tiny-documents"].output, None)
    assert own.shards.keys() - given.shards.keys() == {"tiny-documents"}
    names = {run.config.encoder.pretrained if run.config else run.cell.encoder.name for run in given.runs}
    assert names == {str(start)}


@pytest.mark.parametrize("name", ["work", 'Größe "1" 😀'])
def test_part_of_an_item_needs_its_own_shards_alone(tmp_path, name):
    item, start, folder = load_item("siblings"), tmp_path / "start", tmp_path / name
    start.mkdir()
    one = plan_item("siblings", item, "tiny", *places(folder), {}, [0], start, ["start", "SCL"])
    assert [run.cell.name for run in one.runs] == ["start", "SCL"]
    assert set(one.shards) == {"siblings-pairs"}
    assert one.runs[1].config.run == str(folder / "work/siblings-tiny/SCL-0/run")


def test_figure_2_has_as_many_spans_with_one_anchor_as_with_two(tmp_path):
    for scale, name in (("tiny", "declutr-figure2"), ("paper", "declutr-figure2")):
        plan = plan_item(name, load_item(name), scale, *places(tmp_path), {}, [0])
        one, two = (
            next(run.config for run in plan.runs if run.cell.labels.get("anchors") == label) for label in ("A=1", "A=2")
        )
        assert one.batch_documents == 2 * two.batch_documents
        assert one.spans.num_anchors * one.batch_documents == two.spans.num_anchors * two.batch_documents


@pytest.fixture
def own(tmp_path):
    return write_item(tmp_path)


def refusal(capsys, *words):
    assert main(["reproduce", *map(str, words)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


TERMS = {"both": {}, "mlm": {"objective.terms": "mlm"}}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"axes": {"terms": {"both": {"objective.term": "both"}}}}, ["objective.term", "unknown key"]),
        ({"axes": {"temperature": {"0": {"objective.loss.temperature": 0}}}}, ["temperature", "0"]),
        ({"axis": {}}, ["axis", "unknown key"]),
        ({"axes": {"rate": {0.001: {}}}}, ["axes.rate: the key 0.001 must be text", "quotes"]),
        ({"axes": {}}, ["axes or encoders"]),
        ({"encoders": {"start": {"name": "bert"}}}, ["axes or encoders, and not both"]),
        ({"pairs": [["both", "mml"]]}, ["pairs", "mml", "did you mean `mlm`"]),
        ({"pairs": [["both", "50%"]]}, ["pairs", "both and 50%", "two axes"]),
        ({"axes": {"terms": {}}}, ["axes.terms", "no label"]),
        ({"axes": {"a": {"x": {}}, "b": {"x": {}}}}, ["axes.b.x", "the axis a has this label"]),
        ({"axes": {"a": {"x": {"steps": 3}}, "b": {"y": {"steps": 4}}}}, ["axes.b.y.steps", "axis a"]),
        (
            {
                "axes": {"a": {"x": {"steps": 3}}, "b": {"y": {}}},
                "scales": {"tiny": {"config": "c.yaml", "axes": {"b": {"z": {"steps": 4}}}}},
            },
            ["axes.b.z.steps", "axis a"],
        ),
        ({"printed": {"both, 10%": {"STS-B": 1.0}}}, ["both, 10%", "no run of the item"]),
        ({"columns": {"A": {"tasks": ["STS99"]}}}, ["STS99"]),
        ({"columns": {"A": {"tasks": ["STS12"], "mean_of": ["B"]}}}, ["one of tasks"]),
        ({"columns": {"A": {"mean_of": ["B"]}}}, ["columns.A.mean_of.B", "no column with tasks"]),
        (
            {"axes": {"a": {"b": {"encoder": {"trust_remote_code": True}}}}},
            ["axes.a.b.encoder.trust_remote_code", "cannot be granted by a file"],
        ),
        ({"scales": {"paper": {"config": "configs/declutr-small.yaml"}}}, ["no scale tiny", "paper"]),
    ],
)
def test_wrong_item_is_refused_before_anything_starts(own, tmp_path, capsys, change, parts):
    wrong = tmp_path / "wrong.yaml"
    values = yaml.safe_load(own.read_text()) | {"printed": {}} | change
    wrong.write_text(yaml.safe_dump(values, sort_keys=False))
    line = refusal(capsys, wrong, *arguments(own, tmp_path / "work")[1:])
    assert [part for part in parts if part not in line] == []
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        *[(["run=elsewhere"], "--work"), (["seed=3"], "--seeds"), (["steps"], "key=value")],
        (["stepps=3"], "did you mean `steps`"),
        (["objective.terms=both"], "objective.terms cannot be changed for all runs"),
        (["objective={terms: both}"], "which differ in objective.terms"),
        (["--only", "boht"], "did you mean `both`"),
        (["--start", "configs"], "config.json"),
        (["--work", __file__], "is a file; name a folder"),
    ],
)
def test_wrong_setting_is_refused(own, tmp_path, capsys, words, part):
    assert part in refusal(capsys, *arguments(own, tmp_path / "work", *words))


def test_plan_names_cells_seeds_steps_and_rows_and_runs_nothing(own, tmp_path, capsys):
    assert main(["reproduce", *arguments(own, tmp_path / "work", "--plan", "steps=3", "--seeds", "4,5,6")]) == 0
    text = capsys.readouterr().out
    parts = ("4 cells x 3 seed(s) [4, 5, 6]: 12, 0 finished", "3 steps x 8 rows = 24", "of 50%", "12 runs left")
    assert [part for part in parts if part not in text] == []
    assert not (tmp_path / "work").exists()
    assert "did you mean `scd-table3`" in refusal(capsys, "scd-tabel3", "--plan")
    assert "trains nothing" in refusal(capsys, "declutr-tableS1", "steps=3", "--work", tmp_path)


def changed(own, settings, axes):
    """Plans the item with other settings of its scale and other axes."""
    values = yaml.safe_load(own.read_text()) | {"printed": {}, "axes": axes}
    values["scales"]["tiny"]["settings"] = settings
    if "encoder" in settings:
        values["scales"]["tiny"]["start"] = {"config": values["scales"]["tiny"]["config"]}
    own.write_text(yaml.safe_dump(values, sort_keys=False))
    return load_item(str(own))


@pytest.mark.parametrize(
    ("settings", "change", "expected"),
    [
        ({"steps": None, "epochs": 1}, {"steps": 3}, (3, None)),
        ({"steps": 5}, {"epochs": 2}, (None, 2)),
        ({"steps": None, "epochs": 1}, {"epochs": 2}, (None, 2)),
    ],
)
def test_steps_of_the_command_replace_epochs_of_the_item(own, tmp_path, settings, change, expected):
    plan = plan_item("terms", changed(own, settings, {"terms": TERMS}), "tiny", *places(tmp_path), change, None)
    assert {(run.config.steps, run.config.epochs) for run in plan.runs} == {expected}
    axes = {"anchors": {"A=1": {"epochs": 2}, "A=2": {}}}
    with pytest.raises(UsageError, match=r"steps cannot be changed for all runs, which differ in epochs"):
        plan_item("terms", changed(own, {}, axes), "tiny", *places(tmp_path), {"steps": 3}, None)


def test_section_replaces_what_the_item_has_of_it(own, tmp_path):
    item = changed(own, {"optim.lr": 0.5, "optim.weight_decay": 0.3}, {"terms": TERMS})
    run, *_ = plan_item("terms", item, "tiny", *places(tmp_path), {"optim": {"lr": 0.25}}, None).runs
    assert (run.config.optim.lr, run.config.optim.weight_decay) == (0.25, OptimConfig().weight_decay)


@pytest.mark.parametrize("only", [[], ["start"]])
@pytest.mark.parametrize(
    ("pooling", "expected"), [(["mean", "mean"], "mean"), (["max", "max"], "max"), (["mean", "cls"], None)]
)
def test_start_is_scored_with_the_pooling_that_all_runs_share(own, tmp_path, only, pooling, expected):
    axes = {"axis": {label: {"encoder.pooling": name} for label, name in zip("ab", pooling, strict=True)}}
    item = changed(own, {"encoder": {"pretrained": "$DECLUTR_START"}}, axes)
    (tmp_path / "start").mkdir()
    start = encoder_folder(tmp_path / "start", "bert", pooling="cls")
    first, *_ = plan_item("terms", item, "tiny", *places(tmp_path), {}, None, start, only).runs
    assert (first.cell.name, first.cell.encoder.name, first.cell.encoder.pooling) == ("start", str(start), expected)


def test_start_with_a_prompt_or_where_nothing_starts_from_it_is_refused(own, tmp_path):
    (tmp_path / "start").mkdir()
    start = encoder_folder(tmp_path / "start", "bert", prompts={"query": "find: "}, default_prompt_name="query")
    with pytest.raises(UsageError, match="takes no --start"):
        plan_item("terms", load_item(str(own)), "tiny", *places(tmp_path), {}, None, start)
    item = changed(own, {"encoder": {"pretrained": "$DECLUTR_START"}}, {"axis": {"a": {}, "b": {"optim.lr": 0.5}}})
    with pytest.raises(UsageError, match=f"--start {start}: puts 'find: ' before each text"):
        plan_item("terms", item, "tiny", *places(tmp_path), {}, None, start)


AXES = [Cell({"terms": terms, "share": share}, {}) for terms in ("both", "mlm") for share in ("all", "half")]


def numbers(seeds=5, effect=1.0):
    """Numbers that depend mostly on the seed, as those of runs with the same documents do."""
    rng = np.random.default_rng(0)
    luck = 10 * rng.standard_normal(seeds)
    return {
        cell.name: {
            seed: float(luck[seed] + (effect if cell.labels["terms"] == "both" else 0) + rng.standard_normal())
            for seed in range(seeds)
        }
        for cell in AXES
    }


def averaged(*given):
    return [one for one in compare_labels(*given) if not one.within]


def test_labels_are_compared_as_by_a_paired_t_test():
    given = numbers()
    one, other = averaged(AXES, given)
    assert (one.axis, one.label, one.base, one.seeds) == ("terms", "mlm", "both", 5)
    assert (other.axis, other.label, other.base) == ("share", "half", "all")
    means = {
        terms: np.mean([list(given[f"{terms}, {share}"].values()) for share in ("all", "half")], axis=0)
        for terms in ("both", "mlm")
    }
    expected = stats.ttest_rel(means["mlm"], means["both"])
    interval = expected.confidence_interval(0.95)
    assert one.difference == pytest.approx((means["mlm"] - means["both"]).mean())
    assert one.p == pytest.approx(expected.pvalue)
    assert one.interval == pytest.approx((interval.low, interval.high))
    assert compare_labels(AXES, numbers(effect=20.0))[0].measurable
    assert not compare_labels(AXES, numbers(effect=0.0))[0].measurable
    given = numbers()
    del given["mlm, half"][3]
    assert [one.seeds for one in averaged(AXES, given)] == [4, 4]
    given["both, all"] = {}
    assert averaged(AXES, given) == []


def test_labels_of_two_axes_are_compared_within_each_label_of_the_other():
    given = numbers()
    found = {(one.label, one.within): one for one in compare_labels(AXES, given)}
    assert len(found) == 6
    for share in ("all", "half"):
        one, other = (list(given[f"{terms}, {share}"].values()) for terms in ("mlm", "both"))
        assert found["mlm", share].difference == pytest.approx(np.mean(one) - np.mean(other))
        assert found["mlm", share].p == pytest.approx(stats.ttest_rel(one, other).pvalue)
    three = [Cell(cell.labels | {"third": "x"}, {}) for cell in AXES]
    assert all(not one.within for one in compare_labels(three, {f"{name}, x": one for name, one in given.items()}))
    # Else the other axes' effects would count as those of the label.
    given, part = numbers(), [cell for cell in AXES if cell.name != "both, half"]
    one, other = averaged(part, given)
    pairs = (given["mlm, all"].values(), given["both, all"].values())
    assert one.difference == pytest.approx(np.mean([mlm - both for mlm, both in zip(*pairs, strict=True)]))
    assert (one.label, other.label) == ("mlm", "half")
    apart = [cell for cell in AXES if cell.name in ("both, all", "mlm, half")]
    assert compare_labels(apart, given) == []


@pytest.mark.parametrize("effect", [0.0, 0.1, 40.1])
@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_few_numbers_or_equal_differences_have_neither_interval_nor_p(seeds, effect):
    """Differences that are equal but for rounding, such as 0.3 - 0.2 and 0.2 - 0.1, vary by nothing."""
    equal = {
        cell.name: {seed: 0.1 * seed + effect * (cell.labels["terms"] == "mlm") for seed in range(seeds)}
        for cell in AXES
    }
    one = compare_labels(AXES, equal)[0]
    assert one.difference == pytest.approx(effect)
    assert (one.p, one.interval, one.measurable) == (None, None, False)
    assert ("(one seed)" if seeds == 1 else "(not measurable)") in difference_row(one)


def test_every_label_of_every_axis_is_compared_with_the_start():
    start = dict.fromkeys(range(5), 7.0)
    found = averaged([Cell({}, {}), *AXES], numbers() | {"start": start})
    assert [(one.axis, one.label, one.base) for one in found] == [
        *[("terms", "mlm", "both"), ("terms", "both", "start"), ("terms", "mlm", "start")],
        *[("share", "half", "all"), ("share", "all", "start"), ("share", "half", "start")],
    ]
    assert [one for one in found if one.base != "start"] == averaged(AXES, numbers())
    gains = {one.label: one.difference for one in found if one.base == "start"}
    assert gains["mlm"] - gains["both"] == pytest.approx(found[0].difference)


def test_pairs_of_an_axis_are_compared_in_place_of_its_first_label():
    cells = [Cell({}, {}), *(Cell({"method": name}, {}) for name in ("first", "one", "other"))]
    start, first = dict.fromkeys((0, 1), 1.0), {0: 2.0, 1: 1.0}
    given = {"start": start, "first": first, "one": {0: 3.0, 1: 4.0}, "other": {0: 2.5, 1: 3.0}}
    pairs = [("one", "other"), ("one", "of a cell that is not run")]
    found = compare_labels(cells, given, pairs)
    assert [(one.label, one.base, one.difference) for one in found] == [
        ("one", "other", 0.75),
        ("first", "start", 0.5),
        ("one", "start", 2.5),
        ("other", "start", 1.75),
    ]
    of_other_axis = [("a", "b")]
    assert [one.base for one in compare_labels(cells, given, of_other_axis)] == ["first", "first", *["start"] * 3]
    part = [cell for cell in cells if cell.name != "other"]
    assert [(one.label, one.base) for one in compare_labels(part, given, pairs)] == [
        ("first", "start"),
        ("one", "start"),
    ]


def test_lower_layers_are_those_of_the_source(tmp_path):
    (tmp_path / "source").mkdir()
    source = encoder_folder(tmp_path / "source", "bert")
    lower_layers.main([str(source), "1", str(tmp_path / "one")])
    whole, cut = AutoModel.from_pretrained(source), AutoModel.from_pretrained(tmp_path / "one")
    assert cut.config.num_hidden_layers == len(cut.encoder.layer) == 1
    theirs = whole.state_dict()
    assert all(value.equal(theirs[name]) for name, value in cut.state_dict().items())
    with pytest.raises(SystemExit, match=all_of("9 layers", "has 2")):
        lower_layers.main([str(source), "9", str(tmp_path / "nine")])
    assert not (tmp_path / "nine").exists()


@pytest.mark.parametrize(("source", "target", "part"), [("none", "new", "no config.json"), ("one", "one", "exists")])
def test_wrong_folders_are_refused(tmp_path, capsys, source, target, part):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        lower_layers.main([str(tmp_path / source), "1", str(tmp_path / target)])
    assert part in capsys.readouterr().err
