"""The files of the items: valid at every scale, and as the papers print them."""

import pytest

from declutr.common.config import flat_keys
from declutr.reproduction.item import item_names, load_item
from declutr.reproduction.plan import plan_item

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
