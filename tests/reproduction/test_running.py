"""`declutr reproduce` as a whole on a tiny item, without Ray: runs, results, kills, and what decides scores."""

import json
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml
from folders import encoder_folder
from papers import arguments, changed, refusal, write_item
from prepared import Row, write_prepared
from processes import until
from safetensors.torch import load_file, save_file
from sentevaldata import write_sets
from tinyruns import GEOMETRY, descendants, prepare_values, wait_gone, write_config, write_corpus

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.common.lock import RunLock
from declutr.evaluation.senteval.harness import VERSIONS
from declutr.reproduction import provenance
from declutr.reproduction.item import load_item
from declutr.reproduction.plan import ItemPlan, identity, made_from, run_ready


def call(*words):
    return main(["reproduce", *map(str, words)])


def planned(capsys, *words):
    capsys.readouterr()
    assert call(*words, "--plan") == 0
    return capsys.readouterr().out


def kill_at(file, *words):
    """Kills the command once the file exists, and waits until its processes are gone; returns the command."""
    command = [sys.executable, "-m", "declutr.cli.main", "reproduce", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(file.is_file, str(file), 120)
    started = {pid: title for pid, title in descendants(process.pid).items() if "declutr.cli.main" in title}
    assert started, "a process that works"
    process.kill()
    process.communicate()
    assert wait_gone(started, 20) == {}
    return command


def results(folder, name="results"):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def item(tmp_path_factory):
    return write_item(tmp_path_factory.mktemp("item"))


@pytest.fixture(scope="module")
def finished(item, tmp_path_factory):
    work = tmp_path_factory.mktemp("work")
    assert call(*arguments(item, work)) == 0
    return work / "terms-tiny"


@pytest.mark.slow
def test_results_have_all_runs_the_papers_number_paired_differences_and_facts(finished):
    whole = results(finished)
    assert (whole["finished_runs"], whole["planned_runs"]) == (8, 8)
    cells = whole["numbers"]["STS-B"]
    names = ("both, 100%", "both, 50%", "mlm, 100%", "mlm, 50%")
    assert {(name, seed) for name, seeds in cells.items() for seed in seeds} == {(n, s) for n in names for s in "01"}
    assert len({number for seeds in cells.values() for number in seeds.values()}) == 8
    rows = {(row["axis"], row["label"]): row for row in whole["differences"]["STS-B"] if not row["within"]}
    assert set(rows) == {("terms", "mlm"), ("share", "50%")}
    gains = [cells[f"mlm, {share}"][seed] - cells[f"both, {share}"][seed] for share in ("100%", "50%") for seed in "01"]
    assert rows["terms", "mlm"]["difference"] == pytest.approx(sum(gains) / 4)
    assert whole["hardware"]["cpu"]
    assert whole["versions"]["torch"]
    assert whole["command"].startswith("declutr reproduce")
    assert whole["trained_by"] == whole["scored_by"]
    text = (finished / "results.md").read_text()
    assert [part for part in ("(80.50)", "terms: mlm over both", "*Commit:*", "8 of 8 runs") if part not in text] == []
    assert [mark.partition(":")[0] for mark in whole["not_published_data"]] == ["STS-B"]


@pytest.mark.slow
def test_second_call_repeats_nothing_nor_does_a_part_or_another_column_train(item, finished, tmp_path, capsys):
    work = shutil.copytree(finished.parent, tmp_path / "work")

    def times(name):
        return {path: path.stat().st_mtime_ns for path in work.rglob(name)}

    scored, trained = times("scores.json"), times("metrics.jsonl")
    assert call(*arguments(item, work)) == 0
    whole = (work / "terms-tiny/results.json").read_bytes()
    assert call(*arguments(item, work, "--only", "mlm", "--seeds", "0")) == 0
    assert (work / "terms-tiny/results.json").read_bytes() == whole
    assert results(work / "terms-tiny", "results-part")["numbers"]["STS-B"].keys() == {"mlm, 100%", "mlm, 50%"}
    assert (times("scores.json"), len(scored)) == (scored, 8)
    columns = yaml.safe_load(item.read_text())["columns"] | {"years": {"tasks": ["STS12"]}}
    copy = shutil.copytree(item.parent, tmp_path / "item") / item.name
    assert call(*arguments(changed(copy, "terms", columns=columns), work)) == 0
    numbers = results(work / "terms-tiny")["numbers"]
    assert numbers["years"].keys() == numbers["STS-B"].keys()
    assert times("metrics.jsonl") == trained
    assert "8 finished" in planned(capsys, *arguments(item, finished.parent, "checkpoint.every_steps=2"))
    message = refusal(capsys, *arguments(item, work, "--plan", "optim.lr=0.5"))
    assert "both-100--0/run: was trained with other settings or data (optim.lr was" in message
    (work / "terms-tiny/mlm-100--0/run.made_from.json").unlink()
    assert "mlm-100--0/run: has a run, and no" in refusal(capsys, *arguments(item, work))


@pytest.mark.nightly
def test_killed_call_continues_to_the_same_numbers(item, finished, tmp_path):
    work, words = tmp_path / "work", ("--seeds", "0")
    kill_at(work / "terms-tiny/both-50--0/run/checkpoints/step-00000002/state.json", *arguments(item, work, *words))
    assert not (work / "terms-tiny/mlm-50--0/scores.json").exists()
    assert call(*arguments(item, work, *words)) == 0
    numbers = [results(work / "terms-tiny", "results-part")["numbers"]["STS-B"], results(finished)["numbers"]["STS-B"]]
    again, whole = ({name: seeds["0"] for name, seeds in column.items()} for column in numbers)
    assert again == whole


@pytest.mark.slow
def test_start_is_scored_beside_the_chosen_and_the_last_checkpoint(item, finished, tmp_path, capsys):
    start, judged = finished / "both-100--0/run/export", {"tasks": ["STSBenchmark"], "number": "all"}
    config = yaml.safe_load(item.read_text())["scales"]["tiny"]["config"]
    scale = {"settings": {"encoder": {"pretrained": "$DECLUTR_START"}, "optim.lr": 0.01}, "start": {"config": config}}
    columns = {"chosen": judged, "last": judged | {"checkpoint": "last"}}
    terms = {"both": {}, "mlm": {"objective.terms": "mlm"}}
    known = {"word vectors": {"name": "words:$DECLUTR_START"}}
    copy = changed(item, "starts", scale, columns=columns, axes={"terms": terms}, encoders=known)
    words, numbers = ["--start", start, "--seeds", "0"], {}
    words += [word for label in ("start", "mlm", *known) for word in ("--only", label)]
    for export in ("best", "last"):
        assert call(*arguments(copy, tmp_path / export, *words, f"export={export}")) == 0
        assert not (tmp_path / export / "start").exists()
        part = results(tmp_path / export / "starts-tiny", "results-part")
        numbers[export] = part["numbers"]
        pairs = {(row["label"], row["base"]) for row in part["differences"]["last"]}
        assert pairs == {("mlm", base) for base in ("start", *known)}
        assert numbers[export]["last"]["start"] != numbers[export]["last"]["word vectors"]
    assert numbers["best"]["chosen"]["start"] == numbers["best"]["last"]["start"] == numbers["last"]["last"]["start"]
    assert numbers["best"]["last"]["mlm"] == numbers["last"]["chosen"]["mlm"] == numbers["last"]["last"]["mlm"]
    for word in ("checkpoint.every_steps=2", "validation.patience=7"):  # of these checkpoints one was chosen
        message = refusal(capsys, *arguments(copy, tmp_path / "best", *words, "export=best", "--plan", word))
        assert f"mlm-0/run: was trained with other settings or data ({word.partition('=')[0]} was" in message


@pytest.mark.slow
def test_runs_from_another_start_are_refused(item, tmp_path, capsys):
    config = yaml.safe_load(item.read_text())["scales"]["tiny"]["config"]
    work, words = tmp_path / "work", ("--only", "mlm, 50%", "--seeds", "0")

    def starting(steps):
        start = {"config": config, "settings": {"steps": steps}}
        scale = {"settings": {"encoder": {"pretrained": "$DECLUTR_START"}}, "start": start, "hours_before": 0.5}
        return arguments(changed(item, "starts", scale), work, *words)

    assert "; before them 0.5 hours" in planned(capsys, *starting(2))
    assert call(*starting(2)) == 0
    text = planned(capsys, *starting(2))
    assert ("start      ready" in text, "before them" in text) == (True, False)
    message = "was trained with other settings or data"
    assert f"start: {message} (steps was 2, now 3); delete it, or name" in refusal(capsys, *starting(3), "--plan")
    shutil.rmtree(work / "start")
    (work / "start.made_from.json").unlink()
    assert f"mlm-50--0/run: {message} (encoder.pretrained (content) was" in refusal(capsys, *starting(3))


def test_commit_and_machine_of_the_training_stay_when_its_run_is_scored_again(item, tmp_path):
    copy, folder = changed(item, "single", axes={"run": {"one": {}}}), tmp_path / "work/single-tiny"
    words = arguments(copy, tmp_path / "work", "--seeds", "0")
    assert call(*words) == 0
    scored_by = results(folder, "results-part")["scored_by"]
    (folder / "one-0/trained_by.json").write_text(json.dumps([scored_by[0] | {"commit": "0123abc"}]))
    (folder / "one-0/scores.json").unlink()
    assert call(*words) == 0
    again, text = results(folder, "results-part"), (folder / "results-part.md").read_text()
    assert ([facts["commit"] for facts in again["trained_by"]], again["scored_by"]) == (["0123abc"], scored_by)
    assert text.index("Trained by: *Hardware:*") < text.index("0123abc") < text.index("Scored by: *Hardware:*")


def test_commit_is_that_of_a_checkout_and_never_that_of_a_repository_around_the_package(tmp_path):
    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "theirs")
    for package, commit in (("src", git("rev-parse", "HEAD")), (".venv/lib/site-packages", None)):
        folder = tmp_path / package / "declutr/reproduction"
        folder.mkdir(parents=True)
        spec = spec_from_file_location("copied", shutil.copy(Path(provenance.__file__).resolve(), folder))
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.facts([])["commit"] == commit


def test_failed_runs_and_columns_without_data_are_named_and_the_others_run(item, tmp_path, capsys):
    """A rate beyond all bounds makes a loss infinite; other runs have less than a batch, or shards without a corpus."""
    write_config(tmp_path / "prepare.yaml", prepare=prepare_values("$DECLUTR_DATA/gone.txt", "unused"))
    axes = {"run": {"few": {"data_fraction": 0.01}, "huge": {"optim.lr": 1.0e12, "optim.max_grad_norm": None},
            "other": {"data": "$DECLUTR_WORK/shards/gone"}, "small": {}}}  # fmt: skip
    columns = {"STS-B": {"tasks": ["STSBenchmark"], "number": "all"}, "SNLI": {"tasks": ["SNLI"]}}
    columns["mean"] = {"mean_of": ["STS-B", "SNLI"]}
    scale = {"shards": {"gone": {"config": str(tmp_path / "prepare.yaml")}}}
    copy = changed(item, "rates", scale, axes=axes, columns=columns)
    words = arguments(copy, tmp_path / "work", "--seeds", "0")
    text = planned(capsys, *words)
    for part in ("missing    SNLI: no data of SNLI in", "missing    mean: needs SNLI", "missing    gone: "):
        assert part in text
    assert main(["reproduce", *map(str, words)]) == 1
    text = capsys.readouterr().err
    assert "3 of 4 runs failed, the others are scored: shards gone: corpus.paths" in text
    assert (
        text.index("will fail: few: data_fraction = 0.01") < text.index("run 1 of 4") < text.index("failed: few, seed")
    )
    part = results(tmp_path / "work/rates-tiny", "results-part")
    assert (list(part["numbers"]), set(part["numbers"]["STS-B"])) == (["STS-B"], {"small"})
    assert list(part["failed"]) == ["shards gone", "few, seed 0", "huge, seed 0", "other, seed 0"]
    assert "data_fraction = 0.01: leaves" in part["failed"]["few, seed 0"]
    assert not list((tmp_path / "work/rates-tiny/few-0").rglob("step-*"))
    assert list(part["not_scored"]) == ["SNLI", "mean"]
    text = (tmp_path / "work/rates-tiny/results-part.md").read_text()
    for line in ("| huge | - |", "- other, seed 0: data = ", "- shards gone: corpus.paths", "- SNLI: no data"):
        assert line in text


def test_a_second_command_and_shards_of_other_settings_are_refused(item, tmp_path, capsys):
    """Where shards are prepared, and on the same item. A folder of the same name may be of another item."""
    (tmp_path / "terms-tiny").mkdir()
    for folder in (tmp_path, tmp_path / "terms-tiny"):
        with RunLock(folder, lambda: None):
            assert call(*arguments(item, tmp_path, "--plan")) == 0
            assert "another command works here" in refusal(capsys, *arguments(item, tmp_path))
    write_config(tmp_path / "prepare.yaml", prepare=prepare_values("$DECLUTR_DATA/texts", "unused"))
    copy = changed(item, "a", {"shards": {"documents": {"config": str(tmp_path / "prepare.yaml")}}})
    shutil.copytree(item.parent / "shards", tmp_path / "work/shards/documents")
    message = refusal(capsys, *arguments(copy, tmp_path / "work"))
    assert "was prepared with other settings" in message
    assert f"{item.parent / 'data/texts'}" in message


@pytest.mark.nightly
@pytest.mark.ray
def test_kill_while_shards_are_prepared_ends_all_and_the_same_command_finishes(tmp_path):
    item, work = write_item(tmp_path), tmp_path / "work"
    write_corpus(tmp_path / "data/corpus.jsonl")
    write_config(tmp_path / "prepare.yaml", prepare=prepare_values("$DECLUTR_DATA/corpus.jsonl", "unused"))
    scale = {"settings": {"data": "$DECLUTR_WORK/shards/documents"}}
    scale["shards"] = {"documents": {"config": str(tmp_path / "prepare.yaml")}}
    changed(item, "terms", scale, axes={"run": {"one": {}}})
    command = kill_at(work / "shards/documents/lock.json", *arguments(item, work, "--seeds", "0"))
    again = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    assert list(results(work / "terms-tiny", "results-part")["numbers"]["STS-B"]) == ["one"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """An item that scores two poolings of an encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    (folder / "encoder").mkdir()
    name = str(encoder_folder(folder / "encoder", "bert"))
    write_sets(folder / "data/senteval")
    columns = {"mean": {"tasks": ["STS12"]}, "wmean": {"tasks": ["STS12"], "number": "wmean"}}
    columns["all"] = {"tasks": ["STS12", "STSBenchmark"], "number": "all"}
    columns |= {"dev": {"tasks": ["STSBenchmark"], "number": "all_dev"}, "both": {"mean_of": ["mean", "all"]}}
    item = {"title": "Pooling", "source": "a paper, Table 1", "says": "The mean is better.", "columns": columns}
    item["encoders"] = {"CLS": {"name": name, "pooling": "cls"}, "mean": {"name": name, "pooling": "mean"}}
    path = folder / "pooling.yaml"
    path.write_text(yaml.safe_dump(item | {"scales": {"tiny": {"preset": "prototyping"}}}, sort_keys=False))
    return path


def test_columns_are_the_numbers_of_the_evaluation_and_other_data_are_scored_anew(encoders, tmp_path):
    shutil.copytree(encoders.parent, tmp_path / "item")
    words = arguments(tmp_path / "item" / encoders.name, tmp_path)
    assert call(*words) == 0
    whole = results(tmp_path / "pooling-tiny")
    numbers = {column: cells["mean"]["0"] for column, cells in whole["numbers"].items()}
    (folder,) = (tmp_path / "pooling-tiny/mean-0/senteval").glob("*-????????")
    units = {path.name: json.loads(path.read_text())["scores"] for path in folder.glob("STS*.json")}
    years, pairs = units["STS12.json"], units["STSBenchmark.cosine.json"]
    expected = {"mean": 100 * years["spearman.mean"], "wmean": 100 * years["spearman.wmean"]}
    expected |= {"all": 50 * (years["spearman.all"] + pairs["spearman"]), "dev": 100 * pairs["devspearman"]}
    assert numbers == pytest.approx(expected | {"both": (expected["mean"] + expected["all"]) / 2})
    assert "STSBenchmark.json" not in units, "a regression that no column needs"
    assert whole["numbers"]["mean"]["CLS"] != whole["numbers"]["mean"]["mean"]
    write_sets(tmp_path / "item/data/senteval", seed=1)
    assert call(*words) == 0
    again = results(tmp_path / "pooling-tiny")["numbers"]
    assert [column for column in again if again[column] == whole["numbers"][column]] == []


def test_warnings_of_a_scoring_stand_with_the_results(encoders, tmp_path):
    values = yaml.safe_load(encoders.read_text())
    folder = shutil.copytree(values["encoders"]["CLS"]["name"], tmp_path / "collapsed")
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    copy = changed(encoders, "warned", encoders=values["encoders"] | {"none": {"name": str(folder)}})
    for _ in range(2):  # the second time from files
        assert call(*arguments(copy, tmp_path / "work")) == 0
        ((run, lines),) = results(tmp_path / "work/warned-tiny")["warnings"].items()
        assert run == "none, seed 0"
        assert any(line.endswith("sampled embeddings are zero") for line in lines)
        assert any(line.startswith("STS12: no correlation in") for line in lines)
        assert not any("published" in line for line in lines)
        text = (tmp_path / "work/warned-tiny/results.md").read_text()
        assert "Warnings of the scoring:\n\n- none, seed 0: " in text
        for path in (tmp_path / "work/warned-tiny").glob("*/scores.json"):
            path.unlink()


def test_an_encoder_that_cannot_be_loaded_stops_no_other_run_and_other_data_are_refused(encoders, tmp_path, capsys):
    message = refusal(capsys, *arguments(encoders, tmp_path, checked=True))
    assert [part for part in ("2 of 2 tasks cannot be scored", "--allow-unchecked") if part not in message] == []
    nothing = refusal(capsys, *arguments(encoders, tmp_path, "--senteval", tmp_path / "gone"))
    assert "nothing can be scored: no data of STS12 in" in nothing
    assert not (tmp_path / "pooling-tiny").exists()
    names = yaml.safe_load(encoders.read_text())["encoders"]
    copy = changed(encoders, "gone", encoders={"none": {"name": str(tmp_path / "none")}, "mean": names["mean"]})
    assert "1 of 2 runs failed, the others are scored: none, seed 0" in refusal(capsys, *arguments(copy, tmp_path))
    part = results(tmp_path / "gone-tiny")
    assert (list(part["failed"]), set(part["numbers"]["mean"])) == (["none, seed 0"], {"mean"})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An item, an encoder and shards in a folder that `~` and `$PLACE` name."""
    for name in ("HOME", "PLACE"):
        monkeypatch.setenv(name, str(tmp_path))
    write_item(tmp_path)
    (tmp_path / "encoder").mkdir()
    encoder_folder(tmp_path / "encoder", "bert")
    return tmp_path


def first_run(home, **keys):
    item = load_item(str(changed(home / "terms.yaml", "changed", **keys)))
    plan = ItemPlan("changed", item, "tiny", home / "data", home / "data/senteval", home / "work")
    return plan, plan.runs[0]


def encoder_identity(home, name):
    return identity(*first_run(home, axes={}, encoders={"a": {"name": name}}, scales={"tiny": {}}))


def write(path, text="other"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


IMAGES = {"data": "shards", "objective": {"kind": "supcon"}, "frontend": {"pretrained": "$PLACE/encoder"}}


def test_encoders_of_other_files_and_other_methods_and_classifiers_have_other_scores(home, monkeypatch):
    names = [f"{home}/encoder", f"untrained:{home}/encoder", f"untrained@3:{home}/encoder", "~/encoder"]
    before, again = ([encoder_identity(home, name) for name in names] for _ in range(2))
    assert before == again
    write(home / "encoder/model.safetensors")
    assert not {encoder_identity(home, name) for name in names} & {*before}
    seen = {identity(*first_run(home)), identity(*first_run(home, scale={"preset": "prototyping"}))}
    monkeypatch.setitem(VERSIONS, "cosine", VERSIONS["cosine"] + 1)
    assert len({*seen, identity(*first_run(home))}) == 3


def test_run_that_is_trained_further_has_other_scores_and_its_logs_decide_nothing(home):
    identities = [""]
    for file, decides in (
        ("checkpoints/step-00000002/encoder.pt", True), ("metrics.jsonl", False),
        ("checkpoints/step-00000001/encoder.pt", False), ("checkpoints/step-00000004/encoder.pt", True),
        ("export/model.safetensors", True), ("checkpoints/step-00000006/encoder.pt", False),
    ):  # fmt: skip
        write(home / "run" / file, file)
        identities.append(encoder_identity(home, str(home / "run")))
        assert (identities[-1] != identities[-2]) == decides, file
    assert len({*identities}) == 4


@pytest.mark.parametrize(("settings", "file"), [
    ({"encoder": {"pretrained": "~/encoder"}}, "encoder/model.safetensors"),
    ({"auxiliary_tasks": {"image": IMAGES}}, "encoder/model.safetensors"),
    ({"validation.stsb": "~/pairs"}, "pairs/sts-dev.csv"),
    ({"validation.sickr": "${PLACE}/pairs"}, "pairs/SICK_trial.txt"),
    *[({key: "~/seen"}, "seen") for key in ("data", "validation.data")],
])  # fmt: skip
def test_run_of_other_encoders_pairs_or_shards_has_other_scores_and_is_refused(home, settings, file):
    def write_seen(word):
        shutil.rmtree(home / "seen", ignore_errors=True)
        write_prepared(home / "seen", [[Row(f"{word} words {n} " * 40) for n in range(96)]], geometry=GEOMETRY)

    write_seen("first")
    for name in ("sts-dev.csv", "SICK_trial.txt"):
        write(home / "pairs" / name, "pairs")
    scale = {"settings": settings}
    plan, run = first_run(home, scale=scale)
    before, record = identity(plan, run), Path(f"{run.config.run}.made_from.json")
    write(record, json.dumps(made_from(run.config)))
    assert identity(*first_run(home, scale=scale)) == before
    write_seen("second") if file == "seen" else write(home / file)
    assert identity(plan, run) != before
    with pytest.raises(UsageError, match="was trained with other settings or data"):
        run_ready(run.config)
    shutil.rmtree(home / file.partition("/")[0])  # what is not there now is not compared: it may be made again
    assert not run_ready(run.config)
