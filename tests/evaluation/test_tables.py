"""Several encoders in one table, beside published numbers that are never compared across ways of computing them."""

import json
import re

import pytest
from messages import says
from pages import checked

from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.scores import Report, TaskResult, averages
from declutr.evaluation.senteval.tasks import PROBING, STS, TRANSFER
from declutr.evaluation.tables import compare, literature, markdown, remarks, write_tables
from declutr.report.page import write_scores_page

HOSTILE = "<script>alert(1)</script>|a*b"


def result(name, value, protocol="senteval", standing="identical", warnings=()):
    kinds = {"STS": {f"spearman.{way}": (value + shift) / 100 for shift, way in enumerate(("mean", "wmean", "all"))}}
    kinds["relatedness"] = {"spearman": value / 100, "pearson": 0.1}
    kind = "STS" if re.fullmatch(r"STS\d\d", name) else "relatedness"
    scores = kinds[kind] if name in STS else {"acc": value, "devacc": value} | ({"f1": 80.0} if name == "MRPC" else {})
    return TaskResult(name, protocol, scores, 10, standing, warnings)


def evaluated(name="mine", score=50, pretrained="", **standings):
    senteval = {task: result(task, score, standing=standings.get(task, "identical")) for task in (*STS, *TRANSFER)}
    simcse = {task: result(task, 60, "simcse", standings.get(task, "identical")) for task in (*STS, *TRANSFER)}
    reports = {
        "senteval": Report(name, "senteval", senteval, dict.fromkeys(("SNLI", *PROBING), "no data")),
        "simcse": Report(name, "simcse", simcse),
    }
    return Evaluated(name, "f" * 64, 16, reports, {"alignment": 0.25, "uniformity": -2.0}, ("nearly collapsed",),
                     pretrained=pretrained)  # fmt: skip


def by_name(blocks):
    return {block.name: block for block in blocks}


def published(model, source):
    return next(one for one in literature() if one.model == model and source in one.source)


def test_published_averages_are_those_that_the_paper_prints():
    for model, downstream, probing, mean in (
        ("DeCLUTR-base", 78.16, 73.80, 75.98),
        ("DeCLUTR-small", 76.80, 73.84, 75.32),
    ):
        found = {one.name: one.value for one in averages(published(model, "DeCLUTR").results(), "senteval")}
        assert found["downstream"] == pytest.approx(downstream, abs=0.006)
        assert found["probing"] == pytest.approx(probing, abs=0.006)
        assert found["mean of downstream and probing"] == pytest.approx(mean, abs=0.006)


def test_an_aggregation_stands_beside_its_own_kind_alone():
    blocks = by_name(compare([evaluated()], literature()))
    sources = {name: {row.source.partition(" (")[0] for row in block.rows} for name, block in blocks.items()}
    assert sources["sts-mean"] == {"", "DeCLUTR"}
    assert {source[:3] for source in sources["sts-wmean"]} == {"", "SCL"}
    assert {source[:6] for source in sources["sts-all"]} == {"", "SCD", "Visual"}
    for way, first in (("mean", 50.0), ("wmean", 51.0), ("all", 52.0)):
        assert blocks[f"sts-{way}"].rows[0].cells[0].value == pytest.approx(first)


def test_relatedness_by_regression_and_by_cosine_are_two_columns():
    blocks = by_name(compare([evaluated()], literature()))
    trained, cosine = blocks["downstream"], blocks["sts-all"]
    assert trained.rows[0].cells[trained.columns.index("STS-B")].value == pytest.approx(50)
    assert cosine.rows[0].cells[cosine.columns.index("STS-B")].value == pytest.approx(60)
    assert trained.rows[0].cells[trained.columns.index("MRPC")].value == pytest.approx(65)  # with F1
    assert blocks["transfer"].rows[0].cells[blocks["transfer"].columns.index("MRPC")].value == pytest.approx(50)


def test_columns_without_a_score_are_left_out_and_named():
    blocks = by_name(compare([evaluated()], literature()))
    assert "SNLI" not in blocks["downstream"].columns
    assert "probing" not in blocks
    assert "averages" not in blocks
    (line,) = dict(remarks([evaluated()], ()).parts)["Not scored, and in no average"]
    assert "SNLI, SentLen" in line
    assert line.endswith("no data")


def test_doubted_and_unpublished_numbers_are_marked():
    blocks = by_name(compare([evaluated(MR="unpublished")], literature()))
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
    everything = {task: result(task, 50) for task in STS} | {
        task: TaskResult(task, "senteval", {"acc": 50.0, "f1": 50.0}, 10, "identical")
        for task in (*TRANSFER, *PROBING, "SST5", "SNLI", "SICKEntailment")
    }
    recalls = {f"{way}_r{k}": 50.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
    everything["ImageCaptionRetrieval"] = TaskResult("ImageCaptionRetrieval", "senteval", recalls, 10, "identical")
    whole = Evaluated("whole", "f" * 64, 16, {"senteval": Report("whole", "senteval", everything)})
    write_tables([whole], tmp_path / "all")
    (block,) = [b for b in json.loads((tmp_path / "all/scores.json").read_text())["tables"] if b["name"] == "averages"]
    assert block["columns"][-1] == "Δ mean of the two"
    found = {row["label"]: row["cells"][-1]["value"] for row in block["rows"]}
    assert found["DeCLUTR-base"] == pytest.approx(3.18, abs=0.011)
    assert found["DeCLUTR-small"] == pytest.approx(1.84, abs=0.011)
    assert found["Sentence Transformers"] == pytest.approx(-2.40, abs=0.011)
    assert found["Transformer-base"] is found["GloVe"] is found["whole"] is None

    shown = write_tables([evaluated("start", 40), evaluated("mine", 50, "start", MR="unpublished")], tmp_path / "two")
    assert "Δ mean" in shown
    mine = next(line for line in shown.splitlines() if line.startswith("| **mine**"))
    assert mine.endswith("| +10.00 |")
    assert any(line.startswith("| **mine**") and line.endswith("+10.00* |") for line in shown.splitlines())  # with MR
    assert "mine: to start" in shown
    assert "Δ" not in write_tables([evaluated("start", 40)], tmp_path / "one")
    assert "Δ" not in write_tables([evaluated("mine", 40, "gone")], tmp_path / "one").partition("## Difference")[0]


def test_markdown_cannot_be_led_astray_by_a_name():
    text = markdown(compare([evaluated(HOSTILE)]), remarks([evaluated(HOSTILE)], ()))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables
    assert "\\<script\\>" in text
    assert "<script" not in text.replace("\\<", "")
    row = next(line for line in tables if "script" in line)
    assert len(re.findall(r"(?<!\\)\|", row)) == 8  # STS12-16, the mean and the name


def test_all_three_files_say_the_same(tmp_path):
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


def test_development_averages_have_a_table_of_their_own():
    """As DeCLUTR's ablations print them; published rows have none."""
    scores = {task: TaskResult(task, "senteval", {"acc": 50.0, "devacc": 70.0}, 9, "identical") for task in PROBING}
    mine = Evaluated("mine", "f" * 64, 16, {"senteval": Report("mine", "senteval", scores)})
    blocks = by_name(compare([mine], literature()))
    assert blocks["averages-dev"].columns == ("probing",)
    assert [row.cells[0].value for row in blocks["averages-dev"].rows] == [pytest.approx(70)]
    assert blocks["averages"].rows[0].cells[0].value == pytest.approx(50)
