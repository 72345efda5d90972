"""`train --plan`: the tokens that a run reads, its time on real steps, and the comparison with the outcome."""

import json

import numpy as np
import pyarrow as pa
import pytest
import tinyruns as runs
from madeup import config_of, shards
from messages import says
from shardfolders import LENGTHS

from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.shards.windows import Geometry, document_windows
from declutr.trainer.driver.estimate import TrainEstimate, find_estimate, score
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.spans import sample_spans
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.setup.coverage import coverage
from declutr.trainer.train import main


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return shards(tmp_path_factory.mktemp("estimate") / "data")


@pytest.mark.parametrize(("terms", "passes"), [("both", 1), ("both", 3), ("mlm", 3)])
def test_coverage_equals_the_places_of_the_spans(data, tmp_path, terms, passes):
    """Compared with sets of the places that the spans of the run cover."""
    config, whole = config_of(data, tmp_path / "run"), ShardSet(data, "train")
    found = coverage(DeclutrConfig(terms=terms), config.context("drop"), whole, passes)
    rows, read = whole.take(np.arange(len(LENGTHS))), [set() for _ in LENGTHS]
    sizes = []
    for epoch in range(passes):
        spans = sample_spans(config.spans, config.seed, "drop", rows, np.full(len(LENGTHS), epoch))
        for number, places in enumerate(read):
            drawn = [*spans.anchors[number], *(spans.positives[number].reshape(-1, 2) if terms == "both" else [])]
            places.update(place for start, end in drawn for place in range(start, end))
            sizes += [end - start for start, end in drawn if not epoch]
    assert (found.num_documents, found.num_tokens) == (len(LENGTHS), sum(LENGTHS))
    assert found.read_tokens == sum(map(len, read))
    assert found.span_tokens == sum(sizes)
    assert found.pass_tokens == coverage(DeclutrConfig(terms=terms), config.context("drop"), whole, 1).read_tokens
    assert coverage(DeclutrConfig(terms=terms), config.context("drop"), whole, 0.5).read_tokens < found.read_tokens


def test_a_long_document_is_read_in_small_part():
    """Two anchors of Beta(4, 2) and two positives each of Beta(2, 4), between 16 and 128 tokens: 2 (91 + 2 * 53)."""
    number, geometry = 400, Geometry(num_anchors=2, max_tokens=128)
    rows = pa.table(
        {
            "id": pa.array([row.to_bytes(16, "little") for row in range(number)], pa.binary(16)),
            "windows": [document_windows(13_000, geometry)] * number,
            "num_tokens": [13_000] * number,
        }
    )
    run = RunContext(spans=SpanConfig(num_anchors=2, num_positives=2, min_tokens=16, max_tokens=128))
    _, start, end = DeclutrConfig().reads_tokens(run, rows, np.zeros(number, np.int64)).T
    assert (end - start).sum() / number == pytest.approx(2 * (16 + 112 * 2 / 3 + 2 * (16 + 112 / 3)), rel=0.02)


def test_a_plan_from_real_steps_and_its_score(data, tmp_path, capsys):
    values = config_of(data, tmp_path / "run", batch_documents=16).model_dump(mode="json")
    path = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main([str(path), "--plan"]) == 0
    shown = capsys.readouterr().out
    says(shown, "6 of 16 documents", "1.68", "57")
    assert f"corpus' {sum(LENGTHS)} tokens" in shown
    assert "validations  none" in shown
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.estimate.json", "train.yaml"], "only the estimate"
    config = config_of(data, tmp_path / "run", batch_documents=16)
    found = find_estimate(runs.resolved(config))
    assert found.steps == 6
    assert found.step_tokens == pytest.approx(16 * 2 * (3 + 2), rel=0.3)  # spans of 2 to 4 tokens, and two specials
    assert 0 < found.step_seconds < 60
    assert find_estimate(runs.resolved(config.model_copy(update={"batch_documents": 17}))) is None
    assert find_estimate(runs.resolved(config.model_copy(update={"run": str(tmp_path / "other")}))) is None
    (tmp_path / "run.estimate.json").write_text("{}")
    assert find_estimate(runs.resolved(config)) is None
    (tmp_path / "run.estimate.json").unlink()
    (tmp_path / "run.estimate.json").mkdir()
    assert find_estimate(runs.resolved(config)) is None, "a run ends also without it"


def test_a_plan_counts_validations_on_judged_pairs_alone(data, tmp_path, capsys):
    pairs = [f"main\tcaptions\t2012\t{number}\t{number % 6}\tone {number}\tother\n" for number in range(20)]
    (tmp_path / "sts-dev.csv").write_text("".join(pairs))
    config = config_of(data, tmp_path / "run", batch_documents=16, validation={"stsb": str(tmp_path), "every_steps": 2})
    path = runs.write_config(tmp_path / "train.yaml", train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    assert "validations  3 on judged pairs" in capsys.readouterr().out
    assert find_estimate(runs.resolved(config)).validation_seconds > 0


def test_a_finished_run_scores_its_plan(tmp_path):
    made = TrainEstimate(
        **{"plan_hash": "", "noun": "documents", "steps": 3, "batch_documents": 2, "documents": 6, "passes": 1.0},
        **{"num_tokens": 60, "document_tokens": 10.0, "pass_tokens": 5.0, "span_tokens": 8.0, "read_share": 0.5},
        **{"validations": 2, "scored": 4, "device": "cpu", "workers": 1, "measured_steps": 1, "step_seconds": 30.0},
        **{"step_tokens": 100.0, "validation_seconds": 10.0, "memory_mib": 500.0},
    )
    run = tmp_path / "run"
    run.mkdir()
    assert made.seconds == 3 * 30 + 3 * 10
    assert made.against(run) == {}
    rows = [(20.0, 110, 400.0), (25.0, 130, 600.0), (60.0, 120, 550.0)]
    lines = [
        {"kind": "step", "step": step, "seconds": seconds, "num_tokens": tokens, "peak_memory_mib": memory}
        for step, (seconds, tokens, memory) in enumerate(rows, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = {"step_seconds": (30.0, 25.0), "step_tokens": (100.0, 120.0), "memory_mib": (500.0, 600.0)}
    (run / "seconds.json").write_text("59.0")
    assert made.against(run) == expected, "a short run has no duration"
    (run / "seconds.json").write_text("100.0")
    assert made.against(run) == expected | {"seconds": (120.0, 100.0)}
    told = "estimated before: step_seconds 30 (+20%), step_tokens 100 (-17%), memory_mib 500 (-17%), seconds 120 (+20%)"
    assert score(made.against(run)) == told
    (run / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    assert "seconds" not in made.against(run), "the run did not take all its steps"
