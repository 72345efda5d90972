"""`declutr reproduce` as a whole on a tiny item, without Ray: runs, results, kills, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml
from papers import arguments, write_item
from prepared import Row, write_prepared
from sentevalsets import write_sets
from tinyruns import GEOMETRY
from waiting import until

from declutr.cli.reproduce import _changes, run
from declutr.common.lock import RunLock, RunLockedError, refuse_held
from declutr.reproduction.item import load_item
from declutr.reproduction.plan import plan_item
from declutr.reproduction.results import write_results
from declutr.reproduction.runner import reproduce
from declutr.trainer.step.config import OptimConfig


@pytest.fixture(scope="module")
def item(tmp_path_factory):
    return write_item(tmp_path_factory.mktemp("item"))


@pytest.fixture(scope="module")
def finished(item, tmp_path_factory):
    """Folder of the results of a whole call."""
    work = tmp_path_factory.mktemp("work")
    assert run(arguments(item, work)) == 0
    return work / "terms-tiny"


@pytest.mark.slow
def test_results_have_all_runs_the_papers_number_and_paired_tests(finished):
    found = json.loads((finished / "results.json").read_text())
    assert (found["finished_runs"], found["planned_runs"]) == (8, 8)
    cells = found["numbers"]["STS-B"]
    assert set(cells) == {"both, 100%", "both, 50%", "mlm, 100%", "mlm, 50%"}
    assert all(set(seeds) == {"0", "1"} for seeds in cells.values())
    by_axis = {(one["axis"], one["label"]): one for one in found["differences"]["STS-B"] if not one["within"]}
    assert set(by_axis) == {("terms", "mlm"), ("share", "50%")}
    means = [sum(cells[f"{terms}, {share}"]["0"] for share in ("100%", "50%")) / 2 for terms in ("mlm", "both")]
    second = [sum(cells[f"{terms}, {share}"]["1"] for share in ("100%", "50%")) / 2 for terms in ("mlm", "both")]
    expected = (means[0] - means[1] + second[0] - second[1]) / 2
    assert by_axis["terms", "mlm"]["difference"] == pytest.approx(expected)
    text = (finished / "results.md").read_text()
    assert "(80.50)" in text
    assert "terms: mlm over both" in text
    assert (finished / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_runs_are_ordinary_and_paired(finished):
    """Runs with one seed read the same documents and spans, a smaller share is part of the larger one."""

    def digests(name):
        lines = (finished / name / "run" / "metrics.jsonl").read_text().splitlines()
        return [line["batch_digest"] for line in map(json.loads, lines) if line["kind"] == "step"]

    assert (finished / "both-100--0" / "run" / "export" / "model.safetensors").is_file()
    assert len(digests("both-100--0")) == 4
    assert digests("both-100--0") != digests("both-100--1")
    assert digests("both-50--0") != digests("both-100--0")
    config = yaml.safe_load((finished / "mlm-50--1" / "run" / "config.yaml").read_text())
    assert (config["seed"], config["data_fraction"], config["objective"]["terms"]) == (1, 0.5, "mlm")


@pytest.mark.slow
def test_second_call_repeats_nothing(item, finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("scores.json")}
    assert len(before) == 8
    assert run(arguments(item, finished.parent)) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "8 finished" in capsys.readouterr().out


@pytest.mark.slow
def test_other_columns_are_scored_without_training_again(item, finished, tmp_path):
    shutil.copytree(finished.parent, tmp_path / "work")
    values = yaml.safe_load(item.read_text())
    values["columns"]["recall"] = {"validation": "distant_recall_at_1"}
    (tmp_path / "terms.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    metrics = [one.stat().st_mtime_ns for one in sorted((tmp_path / "work").rglob("metrics.jsonl"))]
    given = ["--scale", "tiny", "--data", str(item.parent / "data"), "--work", str(tmp_path / "work")]
    assert run([str(tmp_path / "terms.yaml"), *given]) == 0
    found = json.loads((tmp_path / "work/terms-tiny/results.json").read_text())["numbers"]
    assert found["recall"].keys() == found["STS-B"].keys()
    assert [one.stat().st_mtime_ns for one in sorted((tmp_path / "work").rglob("metrics.jsonl"))] == metrics


@pytest.mark.slow
def test_killed_call_continues_to_the_same_numbers(item, finished, tmp_path):
    work = tmp_path / "work"
    command = [sys.executable, "-m", "declutr.cli.main", "reproduce", *arguments(item, work, "--seeds", "0")]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until((work / "terms-tiny/both-50--0/run/checkpoints/step-00000002/state.json").is_file, "a checkpoint", 120)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (work / "terms-tiny/mlm-50--0/scores.json").exists()
    assert run(arguments(item, work, "--seeds", "0")) == 0
    files = (work / "terms-tiny/results-part.json", finished / "results.json")
    again, whole = (json.loads(one.read_text())["numbers"] for one in files)
    assert {name: seeds["0"] for name, seeds in again["STS-B"].items()} == {
        name: seeds["0"] for name, seeds in whole["STS-B"].items()
    }


@pytest.mark.slow
def test_given_start_is_scored_beside_the_chosen_and_the_last_checkpoint(item, finished, tmp_path, capsys):
    start = finished / "both-100--0" / "run" / "export"
    shutil.copytree(item.parent / "data", tmp_path / "data")
    write_sets(tmp_path / "data" / "senteval")
    values = yaml.safe_load(item.read_text())
    judged = {"tasks": ["STSBenchmark"], "number": "all"}
    values |= {"printed": {}, "columns": {"chosen": judged, "last": judged | {"checkpoint": "last"}}}
    values["axes"] = {"terms": values["axes"]["terms"]}
    values["scales"]["tiny"]["settings"] = {"encoder": {"pretrained": "$DECLUTR_START"}, "optim.lr": 0.01}
    values["scales"]["tiny"]["start"] = {"config": values["scales"]["tiny"]["config"]}
    (tmp_path / "starts.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    found, given = {}, ["--start", str(start), "--only", "start", "--only", "mlm", "--allow-unchecked"]
    chosen = [*given, "export=best", "--plan"]
    for export in ("best", "last"):
        assert run(arguments(tmp_path / "starts.yaml", tmp_path / export, *given, f"export={export}")) == 0
        assert not (tmp_path / export / "start").exists()
        results = json.loads((tmp_path / export / "starts-tiny/results-part.json").read_text())
        found[export] = results["numbers"]
        assert {(one["label"], one["base"]) for one in results["differences"]["last"]} == {("mlm", "start")}
    capsys.readouterr()
    for word in ("checkpoint.every_steps=2", "validation.patience=7"):  # of these checkpoints one was chosen
        told = refusal(capsys, *arguments(tmp_path / "starts.yaml", tmp_path / "best", *chosen, word))
        assert f"mlm-0: was trained with another {word.partition('=')[0]}; delete it" in told
    assert found["best"]["chosen"]["start"] == found["best"]["last"]["start"] == found["last"]["last"]["start"]
    assert found["best"]["last"]["mlm"] == found["last"]["chosen"]["mlm"] == found["last"]["last"]["mlm"]
    exported = [tmp_path / one / "starts-tiny/mlm-0/run/summary.json" for one in ("best", "last")]
    assert [json.loads(path.read_text())["exported_step"] for path in exported] == [2, 4]
    assert found["best"]["chosen"]["mlm"]["0"] != found["best"]["last"]["mlm"]["0"]


@pytest.mark.slow
def test_start_of_other_settings_is_refused(item, tmp_path, capsys):
    values = yaml.safe_load(item.read_text()) | {"printed": {}}
    scale = values["scales"]["tiny"]
    scale |= {"settings": {"encoder": {"pretrained": "$DECLUTR_START"}}}
    for steps in (2, 3):
        scale["start"] = {"config": scale["config"], "settings": {"steps": steps}}
        (tmp_path / f"{steps}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    given = arguments(item, tmp_path / "work")[1:]
    assert run([str(tmp_path / "2.yaml"), *given, "--only", "start"]) == 0
    assert (tmp_path / "work/start/export/model.safetensors").is_file()
    assert "start      ready" in planned(capsys, str(tmp_path / "2.yaml"), *given)
    told = refusal(capsys, str(tmp_path / "3.yaml"), *given, "--plan")
    assert "start: was trained with other settings (steps was 2, now 3); name another --work" in told
    assert run([str(tmp_path / "2.yaml"), *given, "--only", "mlm, 50%", "--seeds", "0"]) == 0
    shutil.rmtree(tmp_path / "work/start")
    shutil.copy(tmp_path / "3.yaml", tmp_path / "2.yaml")
    assert run([str(tmp_path / "2.yaml"), *given, "--only", "mlm, 50%", "--seeds", "0"]) == 1
    assert "mlm-50--0: was trained with another start; delete it" in capsys.readouterr().err.splitlines()[-1]


def planned(capsys, *given):
    assert run([*given, "--plan"]) == 0
    return capsys.readouterr().out


def test_start_is_refused_where_nothing_starts_from_it(item, finished, tmp_path, capsys):
    words = arguments(item, tmp_path / "work", "--plan")
    assert "--start" in refusal(capsys, *words, "--start", str(finished / "both-100--0/run/export"))
    assert "config.json" in refusal(capsys, *words, "--start", str(tmp_path))


@pytest.mark.slow
def test_other_shards_or_settings_never_show_the_scores_of_earlier_ones(item, finished, tmp_path, capsys):
    work = shutil.copytree(finished.parent, tmp_path / "work")
    write_prepared(tmp_path / "other", [[Row(f"other words {n} " * 40) for n in range(96)]], geometry=GEOMETRY)
    assert run(arguments(item, work, "--plan")) == 0
    assert "8 finished" in capsys.readouterr().out
    assert " 0 finished" in planned(capsys, *arguments(item, work, f"data={tmp_path / 'other'}"))
    assert "8 finished" in planned(capsys, *arguments(item, work, "checkpoint.every_steps=2"))
    assert run(arguments(item, work, f"data={tmp_path / 'other'}")) == 1
    assert "was trained on other shards" in capsys.readouterr().err.splitlines()[-1]
    told = refusal(capsys, *arguments(item, work, "--plan", "optim.lr=0.5"))
    assert "both-100--0/run: was trained with other settings (optim.lr was" in told
    assert "--work" in told


@pytest.mark.slow
def test_part_of_an_item_does_not_replace_the_results_of_all(item, finished, tmp_path):
    work = shutil.copytree(finished.parent, tmp_path / "work")
    whole = (work / "terms-tiny/results.json").read_bytes()
    assert run(arguments(item, work, "--only", "mlm", "--seeds", "0")) == 0
    assert (work / "terms-tiny/results.json").read_bytes() == whole
    part = json.loads((work / "terms-tiny/results-part.json").read_text())
    assert part["numbers"]["STS-B"].keys() == {"mlm, 100%", "mlm, 50%"}
    (made,) = part["trained_by"]
    assert made["versions"]["torch"]
    (work / "terms-tiny/mlm-50--1/scores.json").unlink()
    plan = plan_item("terms", load_item(str(item)), "tiny", *places(item, work), {}, None)
    data = json.loads((work / "terms-tiny/mlm-50--0/scores.json").read_text())["data"]
    text = write_results(plan, [], data, {"mlm, 50%, seed 1": "its loss is not finite"})
    assert "7 of 8 runs." in text
    assert "n=1" in next(line for line in text.splitlines() if line.startswith("| mlm, 50% |"))
    assert "Failed: mlm, 50%, seed 1: its loss is not finite." in text


def places(item, work):
    data = item.parent / "data"
    return data, data / "senteval", work


def test_start_of_another_item_decides_no_run_without_one(item, tmp_path):
    """Items share a working folder; not all of them start from its start."""
    plan = plan_item("terms", load_item(str(item)), "tiny", *places(item, tmp_path), {}, None)
    before = [plan.identity(run) for run in plan.runs]
    (tmp_path / "start/export").mkdir(parents=True)
    (tmp_path / "start/export/config.json").write_text("{}")
    assert [plan.identity(run) for run in plan.runs] == before


def test_section_replaces_what_the_item_has_of_it(item, tmp_path):
    values = yaml.safe_load(item.read_text())
    values["scales"]["tiny"]["settings"] = {"optim.lr": 0.5, "optim.weight_decay": 0.3}
    (tmp_path / "terms.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    changes, problems = _changes(["optim={lr: 0.25}", "auxiliary_tasks={}"])
    assert (changes, problems) == ({"optim": {"lr": 0.25}, "auxiliary_tasks": {}}, [])
    made = load_item(str(tmp_path / "terms.yaml"))
    run, *_ = plan_item("terms", made, "tiny", *places(item, tmp_path), changes, None).runs
    assert (run.config.optim.lr, run.config.optim.weight_decay) == (0.25, OptimConfig().weight_decay)


def test_unknown_label_is_refused_with_the_nearest(item, tmp_path, capsys):
    assert "did you mean `both`" in refusal(capsys, *arguments(item, tmp_path / "work", "--only", "boht"))


def test_plan_names_cells_seeds_steps_and_documents_and_runs_nothing(item, tmp_path, capsys):
    assert run(arguments(item, tmp_path / "work", "--plan", "steps=3", "--seeds", "4,5,6")) == 0
    told = capsys.readouterr().out
    for part in (
        "4 cells x 3 seed(s) [4, 5, 6]: 12, 0 finished",
        "3 steps x 8 documents = 24",
        "of 50%",
        "12 runs left",
    ):
        assert part in told
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("held", [".", "terms-tiny"])
def test_second_command_is_refused_where_shards_are_prepared_or_on_the_same_item(item, tmp_path, capsys, held):
    (tmp_path / "terms-tiny").mkdir()
    with RunLock(tmp_path / held, lambda: None):
        assert run(arguments(item, tmp_path, "--plan")) == 0
        assert "another command works here" in refusal(capsys, *arguments(item, tmp_path))


@pytest.mark.slow
def test_runs_of_an_item_hold_its_folder_alone(item, finished, tmp_path):
    """Another item may run beside it."""
    work, data = shutil.copytree(finished.parent, tmp_path / "work"), item.parent / "data"
    plan = plan_item("terms", load_item(str(item)), "tiny", *places(item, work), {}, [7], None, ["mlm"])
    held = []

    def say(line):
        if line.startswith("run 1 "):
            refuse_held(work)
            with pytest.raises(RunLockedError, match="another command works here"):
                refuse_held(plan.folder)
            held.append(line)

    reproduce(plan, work, data / "senteval", True, ["terms"], say)
    assert len(held) == 1


def refusal(capsys, *given):
    assert run(list(given)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_unknown_item_is_refused_with_the_nearest(capsys):
    assert "did you mean `scd-table3`" in refusal(capsys, "scd-tabel3", "--plan")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"axes": {"terms": {"both": {"objective.term": "both"}}}, "printed": {}}, ["objective.term", "unknown key"]),
        ({"axes": {"temperature": {"0": {"objective.loss.temperature": 0}}}, "printed": {}}, ["temperature", "0"]),
        ({"axis": {}}, ["axis", "unknown key"]),
        ({"axes": {"rate": {0.001: {}}}, "printed": {}}, ["axes.rate: the key 0.001 must be text", "quotes"]),
        ({"axes": {}, "printed": {}}, ["axes or encoders"]),
        ({"encoders": {"start": {"name": "bert"}}}, ["axes or encoders, and not both"]),
        ({"pairs": [["both", "mml"]]}, ["pairs", "mml", "did you mean `mlm`"]),
        ({"pairs": [["both", "50%"]]}, ["pairs", "both and 50%", "two axes"]),
        ({"axes": {"terms": {}}, "printed": {}}, ["axes.terms", "no label"]),
        ({"axes": {"a": {"x": {}}, "b": {"x": {}}}, "printed": {}}, ["axes.b.x", "the axis a has this label"]),
        ({"axes": {"a": {"x": {"steps": 3}}, "b": {"y": {"steps": 4}}}, "printed": {}}, ["axes.b.y.steps", "axis a"]),
        (
            {
                "axes": {"a": {"x": {"steps": 3}}, "b": {"y": {}}},
                "printed": {},
                "scales": {"tiny": {"config": "c.yaml", "axes": {"b": {"z": {"steps": 4}}}}},
            },
            ["axes.b.z.steps", "axis a"],
        ),
        ({"printed": {"both, 10%": {"STS-B": 1.0}}}, ["both, 10%", "no run of the item"]),
        ({"columns": {"A": {"tasks": ["STS99"]}}, "printed": {}}, ["STS99"]),
        ({"columns": {"A": {"tasks": ["STS12"], "validation": "mrr"}}, "printed": {}}, ["one of tasks"]),
        (
            {"axes": {"a": {"b": {"encoder": {"trust_remote_code": True}}}}, "printed": {}},
            ["axes.a.b.encoder.trust_remote_code", "cannot be granted by a file"],
        ),
        ({"scales": {"paper": {"config": "configs/declutr-small.yaml"}}}, ["no scale tiny", "paper"]),
    ],
)
def test_wrong_item_is_refused_before_anything_starts(item, tmp_path, capsys, change, parts):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(yaml.safe_load(item.read_text()) | change, sort_keys=False))
    given = arguments(item, tmp_path / "work")[1:]
    line = refusal(capsys, str(wrong), *given)
    assert [part for part in parts if part not in line] == []
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("word", "part"),
    [
        *[("run=elsewhere", "--work"), ("seed=3", "--seeds"), ("steps", "key=value")],
        ("stepps=3", "did you mean `steps`"),
        ("objective.terms=both", "objective.terms cannot be changed for all runs"),
        ("objective={terms: both}", "which differ in objective.terms"),
    ],
)
def test_wrong_setting_is_refused(item, tmp_path, capsys, word, part):
    assert part in refusal(capsys, *arguments(item, tmp_path / "work", word))


def test_shards_of_other_settings_are_refused(item, tmp_path, capsys):
    """A folder of the same name may be of another item."""
    values = yaml.safe_load(item.read_text())
    values["scales"]["tiny"]["shards"] = {"documents": {"config": str(tmp_path / "prepare.yaml")}}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    section = {
        "output": "unused",
        "tokenizer": {"kind": "train", "vocab_size": 400},
        "corpus": {"kind": "files", "paths": ["$DECLUTR_DATA/texts"]},
        "geometry": GEOMETRY,
    }
    (tmp_path / "prepare.yaml").write_text(yaml.safe_dump({"prepare": section}))
    (tmp_path / "work/shards").mkdir(parents=True)
    shutil.copytree(item.parent / "shards", tmp_path / "work/shards/documents")
    line = refusal(capsys, str(tmp_path / "wrong.yaml"), *arguments(item, tmp_path / "work")[1:])
    assert "was prepared with other settings" in line
    assert f"{item.parent / 'data' / 'texts'}" in line
    assert "--work" in line


def test_failed_run_does_not_stop_the_others(item, tmp_path, capsys):
    """A rate beyond all bounds makes the loss of one cell infinite."""
    values = yaml.safe_load(item.read_text())
    values["axes"] = {"rate": {"small": {}, "huge": {"optim.lr": 1.0e12, "optim.max_grad_norm": None}}}
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(values | {"printed": {}}, sort_keys=False))
    given = [str(tmp_path / "rates.yaml"), *arguments(item, tmp_path / "work", "--seeds", "0")[1:]]
    assert run(given) == 1
    assert "1 of 2 runs failed, the others are scored: huge, seed 0" in capsys.readouterr().err
    found = json.loads((tmp_path / "work/rates-tiny/results-part.json").read_text())
    assert set(found["numbers"]["STS-B"]) == {"small"}
    assert list(found["failed"]) == ["huge, seed 0"]


def test_file_in_place_of_the_working_folder_is_refused(item, tmp_path, capsys):
    (tmp_path / "work").touch()
    assert "is a file; name a folder" in refusal(capsys, *arguments(item, tmp_path / "work", "--plan"))


def test_share_smaller_than_a_batch_is_refused_before_its_run(item, tmp_path, capsys):
    values = yaml.safe_load(item.read_text()) | {"printed": {}}
    values["axes"] = {"terms": values["axes"]["terms"]}
    (tmp_path / "terms.yaml").write_text(yaml.safe_dump(values))
    assert run([str(tmp_path / "terms.yaml"), *arguments(item, tmp_path / "work", "data_fraction=0.01")[1:]]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "data_fraction = 0.01: leaves" in last
    assert "batch_documents = 8" in last
    assert not list((tmp_path / "work").rglob("step-*"))
