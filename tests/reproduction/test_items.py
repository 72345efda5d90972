"""The files of the items: valid at every scale, and as the papers print them."""

import pytest

from declutr.reproduction.item import item_names, load_item
from declutr.reproduction.plan import plan_item

NAMES = item_names()
SCALES = [(name, scale) for name in NAMES for scale in load_item(name).scales]


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_item_has_valid_runs(tmp_path, name, scale):
    plan = plan_item(name, load_item(name), scale, tmp_path / "data", tmp_path / "work", {}, None)
    assert plan.runs
    assert "$" not in str([run.config and run.config.model_dump() for run in plan.runs])
    if scale == "tiny":
        assert len({run.seed for run in plan.runs}) >= 3
        assert all(run.config.scaling.local for run in plan.runs)
        assert all(run.config.epochs or run.config.steps >= 300 for run in plan.runs)
    if not plan.item.encoders:
        changed = [run.config.resume_settings() | {"seed": 0} for run in plan.runs if run.seed == plan.runs[0].seed]
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


def test_figure_2_has_as_many_spans_with_one_anchor_as_with_two(tmp_path):
    for scale, name in (("tiny", "declutr-figure2"), ("paper", "declutr-figure2")):
        plan = plan_item(name, load_item(name), scale, tmp_path, tmp_path, {}, [0])
        one, two = (
            next(run.config for run in plan.runs if run.cell.labels["anchors"] == label) for label in ("A=1", "A=2")
        )
        assert one.batch_documents == 2 * two.batch_documents
        assert one.spans.num_anchors * one.batch_documents == two.spans.num_anchors * two.batch_documents
