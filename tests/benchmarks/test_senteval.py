"""`python -m benchmarks.senteval` on small data: the same scores on both sides, and its figures are there."""

import json
import os
from pathlib import Path

import pytest
from messages import all_of
from released import Plain
from sentevalsets import write_sets
from threads import one_thread

from benchmarks import senteval

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("SENTEVAL")
__all__ = ["one_thread"]
KEYS = {"ratio", "ratio_wall", "max_abs_score_diff", "tasks", "commit", "hardware", "versions", "left_out", "official"}

pytestmark = pytest.mark.usefixtures("one_thread")


def figures(tmp_path, *arguments, official=None):
    path = tmp_path / "figures.json"
    write_sets(tmp_path / "data", rows=24)  # 5 % of a fold is one row at least
    own = ["--data", str(tmp_path / "data"), "--json", str(path), "--short", "--vocab-size", "300", "--model", "tiny"]
    senteval.main([*own, *arguments], official)
    found = json.loads(path.read_text())
    assert found.keys() >= KEYS
    return found


@pytest.mark.slow
def test_benchmark_of_evaluation_equals_the_plain_writing(tmp_path):
    tasks = "MR,SST2,TREC,MRPC,SICK-E,STS-B,STS12,STS16,Tense,COCO"  # SICK-R is fitted as STS-B, for as long
    kept = ["--senteval", "plain", "--hashed-size", "16", "--tasks", tasks, "--keep", str(tmp_path / "kept")]
    found = figures(tmp_path, *kept, official=Plain())
    assert found["official"] == "plain"
    names = {"MR", "SST2", "TREC", "MRPC", "SICKEntailment", "STSBenchmark", "STS12", "Tense"}
    rows = {(row["task"], row["encoder"]): row for row in found["tasks"]}
    assert rows.keys() == {(name, encoder) for name in names for encoder in ("transformer", "hashed-words")}
    assert found["max_abs_score_diff"] == max(row["score_diff"] for row in rows.values()) < 0.3
    assert found["max_abs_diff_of_any_score"] < 0.3
    assert found["ratio"] > 0
    assert "STS16" in found["left_out"]
    assert "pickles" in found["left_out"]["ImageCaptionRetrieval"]
    assert set(found["data"].values()) == {"unpublished"}
    assert len({row["ours"]["score"] for row in rows.values()}) > 9  # not all at chance
    one = figures(tmp_path, *kept, "--encoders", "hashed-words", official=Plain())["tasks"]
    assert one == [row for row in found["tasks"] if row["encoder"] == "hashed-words"]  # with its seconds: not again


def test_without_data_there_is_no_figure(tmp_path):
    with pytest.raises(SystemExit, match=all_of("no data", "all")):
        senteval.main(["--data", str(tmp_path), "--senteval", "plain", "--short"], Plain())
    with pytest.raises(ValueError, match="not a checkout"):
        senteval.main(["--data", str(tmp_path), "--senteval", str(tmp_path)])


@pytest.mark.skipif(not CHECKOUT, reason="SENTEVAL names no checkout of facebookresearch/SentEval")
def test_benchmark_of_evaluation_equals_the_released_code(tmp_path):
    found = figures(tmp_path, "--senteval", str(Path(CHECKOUT)), "--encoders", "hashed-words", "--hashed-size", "16")
    assert found["official"] == "facebookresearch/SentEval"
    assert found["max_abs_diff_of_any_score"] < 0.3
    assert len(found["tasks"]) == 9


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("evaluate_*.json")), ids=str)
def test_document_shows_the_table_of_the_file(path):
    text = (ROOT / "docs/evidence/benchmarks.md").read_text()
    assert [line for line in senteval.table(json.loads(path.read_text())["tasks"]) if line not in text] == []
