"""`benchmarks.quality.encoders`: what it makes of scores, and that a cut-off call goes on. Training is not run."""

import sys
from pathlib import Path

import pytest
from messages import all_of

from benchmarks.evaluate import __main__ as evaluate
from benchmarks.quality import encoders
from declutr.common.storage import read_json

ROOT = Path(__file__).resolve().parents[2]
SHOWN = [("encoders*_*.json", "docs/evidence/results.md"), ("evaluate_*.json", "docs/evidence/benchmarks.md")]
SCORES = {("untrained", 0): 50, ("untrained", 1): 52, ("mlm_only", 0): 49, ("mlm_only", 1): 49}
SCORES |= {("declutr", 0): 60, ("declutr", 1): 66, ("hashed_words", 0): 55, ("hashed_words", 1): 55}


def scored(left_out=None):
    def one(kind, seed, value):
        tasks = {"MR": (value, "identical"), "TREC": (value + 2, "identical"), "Tense": (value / 2, "unpublished")}
        if (kind, seed) == left_out:
            del tasks["TREC"]
        results = {task: {"headline": score, "standing": standing} for task, (score, standing) in tasks.items()}
        return {"encoder": f"{kind}/{seed}", "protocols": {"senteval": {"results": results}}}

    return [one(kind, seed, value) for (kind, seed), value in SCORES.items()], {f"{k}/{s}": (k, s) for k, s in SCORES}


def test_table_has_mean_and_spread_of_every_task_and_average():
    found = encoders.summarise(*scored())
    assert found["tasks"]["MR"]["declutr"] == {"scores": [60, 66], "mean": 63, "sd": 4.2426}
    assert found["averages"]["mean of 2 downstream"]["declutr"] == {"scores": [61, 67], "mean": 64, "sd": 4.2426}
    assert found["averages"]["mean of 1 probing"]["untrained"] == {"scores": [25, 26], "mean": 25.5, "sd": 0.7071}
    lines = list(encoders.table(found))
    assert lines[0] == "| | untrained | MLM only | DeCLUTR | hashed words |"
    assert lines[2] == "| MR | 51.0 ± 1.4 | 49.0 ± 0.0 | 63.0 ± 4.2 | 55.0 ± 0.0 |"
    assert lines[4].startswith("| Tense* |")
    assert len(lines) == 7


def test_table_has_scores_of_touching_and_distant_passages():
    def one(kind, seed, last):
        scores = {
            "recall_at_1": {"first": 0.04, "last": last},
            "distant_recall_at_1": {"first": 0.02, "last": last / 2},
        }
        return {"encoder": kind, "seed": seed, **scores}

    trained = [one("mlm_only", 0, 0.03), one("declutr", 0, 0.1), one("mlm_only", 1, 0.05), one("declutr", 1, 0.2)]
    found = encoders.held_out(trained)
    assert found["distant_recall_at_1"] == {"untrained": [0.02] * 2, "mlm_only": [0.015, 0.025], "declutr": [0.05, 0.1]}
    head, _, touching, distant = encoders.held_out_table(found)
    assert head == "| recall@1, % | untrained | MLM only | DeCLUTR |"
    assert touching == "| the passage that touches it (`recall_at_1`) | 4.0 ± 0.0 | 4.0 ± 1.4 | 15.0 ± 7.1 |"
    assert distant.endswith("(`distant_recall_at_1`) | 2.0 ± 0.0 | 2.0 ± 0.7 | 7.5 ± 3.5 |")


def test_a_mean_of_fewer_seeds_is_no_mean():
    with pytest.raises(ValueError, match=all_of("TREC", "declutr 1")):
        encoders.summarise(*scored(left_out=("declutr", 1)))


def test_benchmark_that_ended_well_is_not_run_again(tmp_path):
    count = tmp_path / "count"

    def append(text, status=0):
        return [sys.executable, "-c", f"import sys; open({str(count)!r}, 'a').write({text!r}); sys.exit({status})"]

    with pytest.raises(SystemExit, match=all_of("train", "status 3", "train.log")):
        encoders.once(tmp_path, "train", append("a", 3))
    for _ in range(2):
        encoders.once(tmp_path, "train", append("b"))
    assert count.read_text() == "ab"
    encoders.once(tmp_path, "train", append("c"))  # another command is other work
    assert count.read_text() == "abc"


def shown(figures):
    """The tables of a result; an older one lists a single held-out score, a short one has no tasks."""
    yield from encoders.table(figures) if "tasks" in figures else ()
    yield from encoders.held_out_table(figures["held_out"]) if "recall_at_1" in figures["held_out"] else ()


@pytest.mark.parametrize(("files", "document"), SHOWN)
def test_documents_show_the_tables_of_the_files(files, document):
    text = (ROOT / document).read_text()
    for path in (ROOT / "benchmarks" / "results").glob(files):
        figures = read_json(path)
        lines = shown(figures) if files.startswith("encoders") else evaluate.table(figures["tasks"])
        assert [line for line in lines if line not in text] == [], path.name
