"""Settings of an item's runs, and columns that need them, as the plan checks them."""

import pytest
import yaml
from papers import arguments, write_item

from declutr.cli.reproduce import run


@pytest.fixture
def item(tmp_path):
    return write_item(tmp_path)


def changed(item, settings, **keys):
    """Changes the settings of the item's scale and other keys of its file; its one axis is the share of the corpus."""
    values = yaml.safe_load(item.read_text())
    values |= {"axes": {"share": values["axes"]["share"]}, "printed": {}} | keys
    values["scales"]["tiny"]["settings"] = settings
    item.write_text(yaml.safe_dump(values, sort_keys=False))
    return item


def refusal(capsys, item, *more):
    """The line that refuses the plan; empty if nothing does."""
    status = run(arguments(item, item.parent / "work", "--plan", *more))
    lines = capsys.readouterr().err.splitlines()
    assert (status, len(lines)) in ((0, 0), (1, 1))
    return "".join(lines)


@pytest.mark.parametrize(
    ("score", "settings", "parts"),
    [
        ("stsb_spearmann", {}, ["column A", "100% has no score", "did you mean `stsb_spearman`"]),
        ("sickr_spearman", {}, ["no score sickr_spearman", "distant_mrr"]),
        ("stsb_spearman", {"validation.stsb": None}, ["no score stsb_spearman"]),
        ("reported_mrr", {}, ["no score reported_mrr", "reported_stsb_spearman"]),
        ("image_nn_accuracy", {}, ["no score image_nn_accuracy"]),
        ("mrr_16", {}, ["no score mrr_16"]),
        ("mrr", {"validation": {"every_steps": 0}}, ["no scores", "validation.every_steps = 0", "above 0"]),
        ("distant_mrr", {}, None),
        ("effective_rank", {}, None),
        ("reported_stsb_spearman", {}, None),
        ("reported_mrr", {"validation.score": "mrr"}, None),
        ("mrr_16", {"objective.matryoshka": {"sizes": [16, "all"]}, "objective.terms": "contrastive"}, None),
        ("image_nn_accuracy", {"auxiliary_tasks.image": {"data": "d", "objective": {"kind": "supcon"}}}, None),
    ],
)
def test_column_of_a_score_that_no_run_has_is_refused_before_anything_starts(item, capsys, score, settings, parts):
    line = refusal(capsys, changed(item, settings, columns={"A": {"validation": score}}))
    assert (not line) if parts is None else [part for part in parts if part not in line] == []


@pytest.mark.parametrize(
    ("own", "given", "told"),
    [
        ({"steps": None, "epochs": 1}, "steps=3", "3 steps x 8 documents"),
        ({"steps": 5}, "epochs=2", "2 pass(es)"),
        ({"steps": None, "epochs": 1}, "epochs=2", "2 pass(es)"),
    ],
)
def test_steps_of_the_command_replace_epochs_of_the_item(item, capsys, own, given, told):
    assert run(arguments(changed(item, own), item.parent / "work", "--plan", given)) == 0
    assert told in capsys.readouterr().out


def test_steps_are_refused_where_runs_differ_in_epochs(item, capsys):
    axes = {"anchors": {"A=1": {"epochs": 2}, "A=2": {}}}
    told = refusal(capsys, changed(item, {}, axes=axes), "steps=3")
    assert "steps cannot be changed for all runs, which differ in epochs" in told
