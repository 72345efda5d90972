"""`declutr evaluate` as a user calls it, on small data; what a search of hostile texts shows; tracebacks."""

import json

import pytest
from folders import embed_rows, encoder_folder
from messages import says
from pages import checked
from sentevaldata import write_sets

from declutr.cli.main import main
from declutr.common.lock import RunLock
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import score
from declutr.evaluation.senteval.tasks import find, sentences

TASKS = "SST2,STS12,STS-B"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"), rows=16)


def evaluate(folder, output, *arguments, tasks="STS12"):
    own = ["--data", str(folder), "--output", str(output), "--allow-unchecked", "--preset", "prototyping"]
    return main(["evaluate", *arguments, *own, "--tasks", tasks, "--cpus", "1"])


@pytest.fixture(scope="module")
def scored(folder, tmp_path_factory):
    """Output folder of two encoders by both protocols."""
    model = encoder_folder(tmp_path_factory.mktemp("model"))
    output = tmp_path_factory.mktemp("output")
    assert evaluate(folder, output, "hashed-words:16", str(model), "--protocol", "both", tasks=TASKS) == 0
    return output


def test_two_encoders_give_one_table(scored):
    told = json.loads((scored / "scores.json").read_text())
    assert told["encoders"][0]["encoder"] == "hashed-words:16"
    tables = {block["name"]: block for block in told["tables"]}
    assert {"sts-mean", "sts-wmean", "sts-all", "downstream", "transfer", "geometry"} == set(tables)
    own = [row for row in tables["downstream"]["rows"] if not row["source"]]
    assert len(own) == 2
    assert tables["downstream"]["columns"] == ["SST2", "STS-B", "Δ mean"]  # of published rows
    assert all(cell["marked"] for row in own for cell in row["cells"][:-1])  # these are not the published data
    says((scored / "scores.md").read_text(), "not the published")
    assert "hashed-words:16" in checked((scored / "scores.html").read_text()).text


def test_second_command_in_one_output_is_refused(folder, tmp_path, capsys):
    """It would remove embeddings that the first one reads, and replace its tables."""
    with RunLock(tmp_path, lambda: None):
        assert evaluate(folder, tmp_path, "hashed-words:16") == 1
    says(capsys.readouterr().err, str(tmp_path), "another command works here")
    assert evaluate(folder, tmp_path, "hashed-words:16") == 0


def test_sizes_are_rows_of_the_table_and_texts_are_embedded_once(folder, tmp_path, capsys):
    """An encoder's own declaration gives its sizes; the scores are those of its first numbers."""
    model = encoder_folder(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 32]}))
    output = tmp_path / "out"
    assert evaluate(folder, output, str(model), "--protocol", "simcse", tasks=TASKS) == 0
    told = json.loads((output / "scores.json").read_text())["encoders"]
    assert [one["encoder"] for one in told] == [f"{model} [8]", str(model)]
    assert capsys.readouterr().out.count(": embedded ") == 1
    assert not any(path.is_file() for path in (output / "embeddings").rglob("*"))
    cut = CutEncoder(load_encoder(str(model)), 8)
    data = inspect(find("STSBenchmark"), folder, allow_unchecked=True).data
    expected = score(data, "cosine", cut.encode(sentences(data)), ClassifierConfig.prototyping()).scores["spearman"]
    (path,) = output.glob(f"*{cut.fingerprint[:8]}/STSBenchmark.cosine.json")
    assert json.loads(path.read_text())["scores"]["spearman"] == pytest.approx(expected, abs=1e-4)
    assert evaluate(folder, tmp_path / "none", str(model), "--sizes", "none") == 0
    told = json.loads((tmp_path / "none/scores.json").read_text())["encoders"]
    assert [one["encoder"] for one in told] == [str(model)]


def test_encoder_that_cuts_its_embeddings_takes_a_pooling_and_is_embedded_once(folder, tmp_path, capsys):
    model, output = encoder_folder(tmp_path / "model", truncate_dim=16), tmp_path / "out"
    assert evaluate(folder, output, str(model), "--pooling", "cls", "--sizes", "8", tasks=TASKS) == 0
    scores = json.loads((output / "scores.json").read_text())["encoders"]
    assert [row["encoder"] for row in scores] == [f"{model} [16] [8]", f"{model} [16]"]
    assert capsys.readouterr().out.count(": embedded ") == 1
    assert not any(path.is_file() for path in (output / "embeddings").rglob("*"))


def test_encoder_that_cannot_be_scored_is_named_once_and_the_rest_scored(folder, tmp_path, capsys):
    broken = encoder_folder(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert evaluate(folder, tmp_path / "out", "hashed-words:0", str(broken), "hashed-words:8") == 1
    shown = capsys.readouterr()
    assert shown.err.count("hashed-words:SIZE") == 1
    assert shown.err.count("is damaged or") == 1
    says(shown.err, "2 of 3 encoders", "hashed-words:0", broken)
    assert "**hashed-words:8**" in shown.out


@pytest.mark.parametrize("encoders", [[], ["hashed-words:8"]])
def test_a_call_that_scores_nothing_fails(tmp_path, encoders, capsys):
    (tmp_path / "data").mkdir()
    given = ["evaluate", *encoders, "--data", str(tmp_path / "data"), "--output", str(tmp_path / "out")]
    assert main([*given, "--tasks", "STS12,MR"]) == 1
    assert ("nothing was scored" in capsys.readouterr().err) == bool(encoders)


def test_tasks_that_give_no_score_are_no_success(tmp_path, capsys):
    """Three rows a class are too few for the folds."""
    data = write_sets(tmp_path / "data", rows=3)
    given = ["--data", str(data), "--output", str(tmp_path / "out"), "--allow-unchecked", "--tasks", "MR"]
    assert main(["evaluate", "hashed-words:8", *given]) == 1
    says(capsys.readouterr().err, "hashed-words:8", "no task")


@pytest.mark.parametrize(
    ("written", "meant"),
    [("STSB", "STS-B"), ("sts_benchmark", "STSBenchmark"), ("SST-2", "SST2"), ("trasnfer", "transfer")],
)
def test_a_task_that_is_not_known_brings_a_suggestion(tmp_path, written, meant, capsys):
    assert main(["evaluate", "hashed-words:8", "--data", str(tmp_path), "--tasks", f"MR,{written}"]) == 1
    says(capsys.readouterr().err, f"{written!r}", f"`{meant}`")


def test_other_data_are_not_scored_unasked(folder, tmp_path, capsys):
    given = ["evaluate", "hashed-words:8", "--data", str(folder), "--output", str(tmp_path), "--tasks", "STS12"]
    assert main(given) == 1
    assert "REFUSED" in capsys.readouterr().out
    assert "spearman" not in "".join(path.read_text() for path in tmp_path.rglob("*.json") if path.is_file())


def test_pooling_of_the_command_replaces_the_encoders_own(folder, tmp_path, capsys):
    model = str(encoder_folder(tmp_path / "model"))
    scores = []
    for more in ([], ["--pooling", "cls"], ["--pooling", "mean"]):
        assert evaluate(folder, tmp_path / "out", model, *more) == 0
        scores.append(json.loads((tmp_path / "out/scores.json").read_text())["encoders"][0]["protocols"])
    assert scores[0] == scores[2] != scores[1]
    capsys.readouterr()
    assert evaluate(folder, tmp_path / "out", "hashed-words:8", "--pooling", "cls") == 1
    assert "hashed-words:8: --pooling cls has no effect" in capsys.readouterr().err


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """An index whose texts and ids steer a terminal."""
    hostile = tmp_path_factory.mktemp("hostile")
    rows = [{"text": f"cat \x1b[2J\u202e … {number}", "id": f"\x1b]0;x\x07{number}"} for number in range(3)]
    output = embed_rows(hostile, rows, "--id-field", "id", suffix=".parquet")
    assert main(["index", str(output), "--output", str(hostile / "index")]) == 0
    return hostile / "index"


def test_search_shows_what_it_finds(index, capsys):
    assert main(["search", str(index), "cat"]) == 0
    told = capsys.readouterr().out
    assert "⟨U+001B⟩[2J⟨U+202E⟩" in told
    assert all(line.isprintable() for line in told.splitlines())


def test_a_traceback_is_shown_for_debugging_only(monkeypatch, capsys):
    def fail(_):
        raise OSError("no space left")

    monkeypatch.setattr("declutr.cli.encoders.run_search", fail)
    for level, shown in (("INFO", False), ("DEBUG", True)):
        monkeypatch.setenv("DECLUTR_LOG", level)
        assert main(["search", "index", "query"]) == 1
        told = capsys.readouterr().err
        assert told.endswith("no space left\n")
        assert ("Traceback" in told) == shown
