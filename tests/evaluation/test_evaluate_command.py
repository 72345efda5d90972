"""`declutr evaluate` on small data and on a local task of MTEB; its tables, beside published numbers."""

import json
import re
from importlib import import_module

import pytest
from encoderfiles import keys
from folders import embed_rows, encoder_folder
from messages import says
from pages import checked
from scipy.stats import spearmanr
from sentence_transformers.util import pairwise_cos_sim
from sentevaldata import write_sets

from declutr.cli.main import main
from declutr.common.lock import RunLock
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import CutEncoder
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.scores import Report, TaskResult, averages, score
from declutr.evaluation.senteval.tasks import PROBING, STS, TRANSFER, find, sentences
from declutr.evaluation.tables import compare, literature, markdown, remarks, write_tables
from declutr.report.page import write_scores_page

TASKS = "SST2,STS12,STS-B"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"), rows=16)


def evaluate(folder, output, *arguments, tasks="STS12"):
    own = ["--data", str(folder), "--output", str(output), "--allow-unchecked", "--preset", "prototyping"]
    return main(["evaluate", *arguments, *own, "--tasks", tasks, "--cpus", "1"])


def test_two_encoders_by_both_protocols_give_one_table(folder, tmp_path):
    encoders = ["hashed-words:16", str(encoder_folder(tmp_path / "model"))]
    assert evaluate(folder, tmp_path / "out", *encoders, "--protocol", "both", tasks=TASKS) == 0
    scores, text, page = ((tmp_path / f"out/scores.{kind}").read_text() for kind in ("json", "md", "html"))
    scores = json.loads(scores)
    assert scores["encoders"][0]["encoder"] == "hashed-words:16"
    tables = {block["name"]: block for block in scores["tables"]}
    assert {"sts-mean", "sts-wmean", "sts-all", "downstream", "transfer", "geometry"} == set(tables)
    own = [row for row in tables["downstream"]["rows"] if not row["source"]]
    assert len(own) == 2
    assert tables["downstream"]["columns"] == ["SST2", "STS-B", "Δ mean"]  # of published rows
    assert all(cell["marked"] for row in own for cell in row["cells"][:-1])  # these are not the published data
    says(text, "not the published")
    assert "hashed-words:16" in checked(page).text


def names_of(output):
    return [row["encoder"] for row in json.loads((output / "scores.json").read_text())["encoders"]]


def test_sizes_are_rows_of_the_table_and_texts_are_embedded_once(folder, tmp_path, capsys):
    """An encoder's own declaration gives its sizes; the scores are those of its first numbers."""
    model, output = encoder_folder(tmp_path / "model"), tmp_path / "out"
    keys("config.json", matryoshka_dimensions=[8, 32])(model)
    assert evaluate(folder, output, str(model), "--protocol", "simcse", tasks=TASKS) == 0
    assert names_of(output) == [f"{model} [8]", str(model)]
    assert capsys.readouterr().out.count(": embedded ") == 1
    assert not any(path.is_file() for path in (output / "embeddings").rglob("*"))
    cut = CutEncoder(load_encoder(str(model)), 8)
    data = inspect(find("STSBenchmark"), folder, allow_unchecked=True).data
    expected = score(data, "cosine", cut.encode(sentences(data)), ClassifierConfig.prototyping()).scores["spearman"]
    (path,) = output.glob(f"*{cut.fingerprint[:8]}/STSBenchmark.cosine.json")
    assert json.loads(path.read_text())["scores"]["spearman"] == pytest.approx(expected, abs=1e-4)
    assert evaluate(folder, tmp_path / "none", str(model), "--sizes", "none") == 0
    assert names_of(tmp_path / "none") == [str(model)]
    model, output = encoder_folder(tmp_path / "cut", truncate_dim=16), tmp_path / "pooled"
    capsys.readouterr()
    assert evaluate(folder, output, str(model), "--pooling", "cls", "--sizes", "8", tasks=TASKS) == 0
    assert names_of(output) == [f"{model} [16] [8]", f"{model} [16]"]
    assert capsys.readouterr().out.count(": embedded ") == 1
    assert not any(path.is_file() for path in (output / "embeddings").rglob("*"))


def test_a_second_command_in_one_output_is_refused_and_an_encoder_that_cannot_be_scored_named_once(
    folder, tmp_path, capsys
):
    """The second would remove embeddings that the first one reads, and replace its tables."""
    out = tmp_path / "out"
    out.mkdir()
    with RunLock(out, lambda: None):
        assert evaluate(folder, out, "hashed-words:16") == 1
    says(capsys.readouterr().err, str(out), "another command works here")
    broken = encoder_folder(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert evaluate(folder, out, str(broken), "hashed-words:8") == 1
    shown = capsys.readouterr()
    assert shown.err.count("is damaged or") == 1
    says(shown.err, "1 of 2 encoders", broken)
    assert "**hashed-words:8**" in shown.out


def test_calls_that_score_nothing_or_name_unknown_tasks_are_no_success(folder, tmp_path, capsys, refused):
    words, out = ["evaluate", "hashed-words:8", "--output", str(tmp_path / "out"), "--data"], tmp_path / "out"
    assert main([*words, str(folder), "--tasks", "STS12"]) == 1  # other data, unasked
    assert "REFUSED" in capsys.readouterr().out
    assert "spearman" not in "".join(path.read_text() for path in out.rglob("*.json") if path.is_file())
    few = write_sets(tmp_path / "data", rows=3)  # three rows a class are too few for the folds
    refused([*words, few, "--allow-unchecked", "--tasks", "MR"], "hashed-words:8", "no task")
    for name, suggestion in (
        ("STSB", "STS-B"), ("sts_benchmark", "STSBenchmark"), ("SST-2", "SST2"), ("trasnfer", "transfer")
    ):  # fmt: skip
        refused([*words, few, "--tasks", f"MR,{name}"], f"{name!r}", f"`{suggestion}`")
    (tmp_path / "empty" / "downstream").mkdir(parents=True)
    for more in (words, [words[0], *words[2:]]):  # without an encoder the data are only checked
        capsys.readouterr()
        assert main([*more, str(tmp_path / "empty"), "--tasks", "STS12,MR"]) == 1
        assert ("nothing was scored" in capsys.readouterr().err) == (more is words)


def test_pooling_of_the_command_replaces_the_encoders_own_and_what_a_kill_left_is_not_foreign(folder, tmp_path, capsys):
    model, path = str(encoder_folder(tmp_path / "model")), tmp_path / "out/scores.json"
    scores = []
    for more in ([], ["--pooling", "cls"], ["--pooling", "mean"]):
        assert evaluate(folder, tmp_path / "out", model, *more) == 0
        scores.append(json.loads(path.read_text())["encoders"][0]["protocols"])
        path.unlink()  # as after a kill before the last file
        (path.parent / "mteb").mkdir(exist_ok=True)
    assert scores[0] == scores[2] != scores[1]
    capsys.readouterr()
    assert evaluate(folder, tmp_path / "out", "hashed-words:8", "--pooling", "cls") == 1
    assert "hashed-words:8: --pooling cls has no effect" in capsys.readouterr().err
    (tmp_path / "out/a.txt").touch()
    assert evaluate(folder, tmp_path / "out", model) == 1
    says(capsys.readouterr().err, tmp_path / "out", "holds a.txt")


def test_search_shows_texts_and_ids_that_steer_a_terminal(tmp_path, capsys):
    rows = [{"text": f"cat \x1b[2J\u202e … {number}", "id": f"\x1b]0;x\x07{number}"} for number in range(3)]
    output = embed_rows(tmp_path, rows, "--id-field", "id", suffix=".parquet")
    assert main(["index", str(output), "--output", str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "cat"]) == 0
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


UNKNOWN = ("reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
UNKNOWN += ("sample_creation", "bibtex_citation")
FIRST = ["ab cd", "one two three", "word word 7 and more", "x", "cd ab", "three four"]
SECOND = ["ab cd cd", "seven six", "word 8 and more", "naïve", "cd ab", "four three"]
GOLD = [4.0, 1.0, 3.5, 0.0, 5.0, 2.0]


@pytest.fixture
def task(monkeypatch):
    """A task that MTEB knows by its name, with its data here, which its own loader and evaluator read."""
    pytest.importorskip("mteb", reason="pip install -e '.[mteb]'")
    datasets = pytest.importorskip("datasets")
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Local(AbsTaskSTS):
        metadata = TaskMetadata(
            name="LocalSTS", dataset={"path": "local/sts", "revision": "0"}, description="six pairs", type="STS",
            category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman",
            **dict.fromkeys(UNKNOWN),
        )  # fmt: skip
        min_score, max_score = 0, 5

        def load_data(self, **_):
            rows = {"sentence1": FIRST, "sentence2": SECOND, "score": GOLD}
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(rows)})
            self.data_loaded = True

    monkeypatch.setitem(import_module("mteb.get_tasks")._TASKS_REGISTRY, "LocalSTS", Local)
    return Local()


def spearman(name):
    encoder = load_encoder(name, device="cpu")
    return spearmanr(pairwise_cos_sim(encoder.encode(FIRST), encoder.encode(SECOND)), GOLD).statistic


@pytest.mark.filterwarnings("ignore")
def test_evaluate_of_an_mteb_task_writes_its_score_and_finds_results_of_its_precision(tmp_path, task, capsys, refused):
    folder, name = encoder_folder(tmp_path / "export"), task.metadata.name
    given = ["--mteb", name, "--output", str(tmp_path / "scores")]
    assert main(["evaluate", str(folder), "hashed-words:8", *given]) == 0
    found = json.loads((tmp_path / "scores/mteb.json").read_text())["encoders"]
    for encoder in (str(folder), "hashed-words:8"):
        assert found[encoder] == {name: pytest.approx(100 * spearman(encoder), abs=1e-3)}
    assert f"{folder}: LocalSTS" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "gone"), "hashed-words:8", *given]) == 1
    assert capsys.readouterr().err.count("not scored:") == 1
    refused(["evaluate", "hashed-words:8", "--mteb", "STSBenchmrk"], "Did you mean", "'STSBenchmark'")
    from declutr.evaluation.mteb import MtebEncoder

    exact, half = (load_encoder(folder, device="cpu", precision=precision) for precision in ("fp32", "bf16"))
    assert MtebEncoder(exact).mteb_model_meta.revision == exact.fingerprint[:16], "earlier results are found"
    assert MtebEncoder(half).mteb_model_meta.revision != exact.fingerprint[:16]


HOSTILE = "<script>alert(1)</script>|a*b"


def result(name, value, protocol="senteval", standing="identical", warnings=()):
    kinds = {"STS": {f"spearman.{way}": (value + shift) / 100 for shift, way in enumerate(("mean", "wmean", "all"))}}
    kinds["relatedness"] = {"spearman": value / 100, "pearson": 0.1}
    kind = "STS" if re.fullmatch(r"STS\d\d", name) else "relatedness"
    scores = kinds[kind] if name in STS else {"acc": value, "devacc": value} | ({"f1": 80.0} if name == "MRPC" else {})
    return TaskResult(name, protocol, scores, 10, standing, warnings)


def evaluated(name="mine", score=50, pretrained="", **standings):
    tasks = [(task, standings.get(task, "identical")) for task in (*STS, *TRANSFER)]
    senteval = {task: result(task, score, standing=standing) for task, standing in tasks}
    simcse = {task: result(task, 60, "simcse", standing) for task, standing in tasks}
    missing = dict.fromkeys(("SNLI", *PROBING), "no data")
    reports = {"senteval": Report(name, "senteval", senteval, missing), "simcse": Report(name, "simcse", simcse)}
    geometry, warnings = {"alignment": 0.25, "uniformity": -2.0}, ("nearly collapsed",)
    return Evaluated(name, "f" * 64, 16, reports, geometry, warnings, pretrained=pretrained)


def compared(*encoders):
    return {block.name: block for block in compare(encoders, literature())}


def test_published_averages_are_those_that_the_paper_prints_and_those_of_dev_scores_have_a_table():
    for model, *printed in (("DeCLUTR-base", 78.16, 73.80, 75.98), ("DeCLUTR-small", 76.80, 73.84, 75.32)):
        published = next(row for row in literature() if row.model == model and "DeCLUTR" in row.source)
        found = {average.name: average.value for average in averages(published.results(), "senteval")}
        names = ("downstream", "probing", "mean of downstream and probing")
        assert [found[name] for name in names] == pytest.approx(printed, abs=0.006)
    scores = {task: TaskResult(task, "senteval", {"acc": 50.0, "devacc": 70.0}, 9, "identical") for task in PROBING}
    blocks = compared(Evaluated("mine", "f" * 64, 16, {"senteval": Report("mine", "senteval", scores)}))
    assert blocks["averages-dev"].columns == ("probing",)  # as DeCLUTR's ablations print them
    assert [row.cells[0].value for row in blocks["averages-dev"].rows] == [pytest.approx(70)]
    assert blocks["averages"].rows[0].cells[0].value == pytest.approx(50)


def test_an_aggregation_stands_beside_its_own_kind_alone_and_relatedness_has_two_columns():
    blocks = compared(evaluated())
    sources = {name: {row.source.partition(" (")[0] for row in block.rows} for name, block in blocks.items()}
    assert sources["sts-mean"] == {"", "DeCLUTR"}
    assert {source[:3] for source in sources["sts-wmean"]} == {"", "SCL"}
    assert {source[:6] for source in sources["sts-all"]} == {"", "SCD", "Visual"}
    for way, first in (("mean", 50.0), ("wmean", 51.0), ("all", 52.0)):
        assert blocks[f"sts-{way}"].rows[0].cells[0].value == pytest.approx(first)
    for name, column, value in (  # STS-B by regression and by cosine; MRPC with F1 and without
        ("downstream", "STS-B", 50), ("sts-all", "STS-B", 60), ("downstream", "MRPC", 65), ("transfer", "MRPC", 50)
    ):  # fmt: skip
        assert blocks[name].rows[0].cells[blocks[name].columns.index(column)].value == pytest.approx(value)
    assert "SNLI" not in blocks["downstream"].columns
    assert not {"probing", "averages"} & blocks.keys()
    (line,) = dict(remarks([evaluated()], ()).parts)["Not scored, and in no average"]
    assert "SNLI, SentLen" in line
    assert line.endswith("no data")


def test_doubted_and_unpublished_numbers_are_marked():
    blocks = compared(evaluated(MR="unpublished"))
    rows = {(row.label, row.source[:3]): row for row in blocks["transfer"].rows}
    columns = blocks["transfer"].columns
    marked = {key: {columns[i] for i, cell in enumerate(row.cells) if cell.marked} for key, row in rows.items()}
    assert marked["mine", ""] == {"MR", "mean"}
    assert marked["SCD-BERT-base", "SCD"] == {"MR", "SUBJ", "mean"}
    assert marked["SCD-RoBERTa-base", "SCD"] == set()
    told = "\n".join(dict(remarks([evaluated(MR="unpublished")], literature()).parts)["Marked *"])
    says(told, "mine", "MR", "not the published")
    assert "5000 of 5020" in told


def test_table_shows_differences_to_the_pretrained_encoder(tmp_path):
    """Of the published rows they are those that follow from the paper's Avg. column: 75.98 - 72.80, 75.32 - 73.48."""
    scores = {key: {"acc": 50.0, "f1": 50.0} for key in (*TRANSFER, *PROBING, "SST5", "SNLI", "SICKEntailment")}
    scores["ImageCaptionRetrieval"] = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
    everything = {task: TaskResult(task, "senteval", values, 10, "identical") for task, values in scores.items()}
    everything |= {task: result(task, 50) for task in STS}
    whole = Evaluated("whole", "f" * 64, 16, {"senteval": Report("whole", "senteval", everything)})
    write_tables([whole], tmp_path / "all")
    (block,) = [b for b in json.loads((tmp_path / "all/scores.json").read_text())["tables"] if b["name"] == "averages"]
    assert block["columns"][-1] == "Δ mean of the two"
    found = {row["label"]: row["cells"][-1]["value"] for row in block["rows"]}
    labels = ("DeCLUTR-base", "DeCLUTR-small", "Sentence Transformers")
    assert [found[label] for label in labels] == pytest.approx([3.18, 1.84, -2.40], abs=0.011)
    assert found["Transformer-base"] is found["GloVe"] is found["whole"] is None

    shown = write_tables([evaluated("start", 40), evaluated("mine", 50, "start", MR="unpublished")], tmp_path / "two")
    assert "Δ mean" in shown
    mine = next(line for line in shown.splitlines() if line.startswith("| **mine**"))
    assert mine.endswith("| +10.00 |")
    assert any(line.startswith("| **mine**") and line.endswith("+10.00* |") for line in shown.splitlines())  # with MR
    assert "mine: to start" in shown
    assert "Δ" not in write_tables([evaluated("start", 40)], tmp_path / "one")
    assert "Δ" not in write_tables([evaluated("mine", 40, "gone")], tmp_path / "one").partition("## Difference")[0]


def test_all_three_files_say_the_same_and_markdown_cannot_be_led_astray_by_a_name(tmp_path):
    text = markdown(compare([evaluated(HOSTILE)]), remarks([evaluated(HOSTILE)], ()))
    assert "\\<script\\>" in text
    assert "<script" not in text.replace("\\<", "")
    row = next(line for line in text.splitlines() if line.startswith("|") and "script" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 8  # STS12-16, the mean and the name
    encoders = [evaluated("start", 40), evaluated("mine", 50, "start"), evaluated(HOSTILE)]
    shown = write_tables(encoders, tmp_path)
    write_scores_page(encoders, tmp_path / "scores.html")
    assert "DeCLUTR-base" not in shown
    told = json.loads((tmp_path / "scores.json").read_text())
    tables = {block["name"]: block for block in told["tables"]}
    assert [row["label"] for row in tables["sts-mean"]["rows"]][:3] == ["start", "mine", HOSTILE]
    assert told["encoders"][0]["protocols"]["simcse"]["averages"][0]["value"] == pytest.approx(61.43, abs=0.01)
    page = checked((tmp_path / "scores.html").read_text()).text
    assert HOSTILE in page
    assert "+10.00" in page
    text = (tmp_path / "scores.md").read_text()
    assert "*DeCLUTR-base*, published (1)" in text
    assert "\n- 1: DeCLUTR (arXiv 2006.03659v1)" in text
    for block in told["tables"]:
        assert block["title"].split(",")[0] in text
        numbers = [cell["value"] for row in block["rows"] for cell in row["cells"] if cell["value"] is not None]
        for value in numbers:
            number = f"{value:.{2 if block['percent'] else 3}f}"
            assert number in text
            assert number in page
