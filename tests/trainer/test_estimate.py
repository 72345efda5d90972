"""`train --plan`: the tokens that a run reads, and its time on real steps."""

import numpy as np
import pyarrow as pa
import pytest
import tinyruns as runs
from madeup import config_of, shards
from messages import says
from shardfolders import LENGTHS

from declutr.pipeline.shards.shards import ShardSet
from declutr.pipeline.shards.windows import Geometry, document_windows
from declutr.trainer.driver.estimate import plan_ahead
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
    ids = pa.array([row.to_bytes(16, "little") for row in range(number)], pa.binary(16))
    windows = [document_windows(13_000, geometry)] * number
    rows = pa.table({"id": ids, "windows": windows, "num_tokens": [13_000] * number})
    run = RunContext(spans=SpanConfig(num_anchors=2, num_positives=2, min_tokens=16, max_tokens=128))
    _, start, end = DeclutrConfig().reads_tokens(run, rows, np.zeros(number, np.int64)).T
    assert (end - start).sum() / number == pytest.approx(2 * (16 + 112 * 2 / 3 + 2 * (16 + 112 / 3)), rel=0.02)


def test_a_plan_from_real_steps(data, tmp_path, capsys):
    values = config_of(data, tmp_path / "run", batch_documents=16).model_dump(mode="json")
    path = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main([str(path), "--plan"]) == 0
    shown = capsys.readouterr().out
    says(shown, "6 of 16 documents", "1.68", "57")
    assert f"corpus' {sum(LENGTHS)} tokens" in shown
    assert "validations  none" in shown
    assert [one.name for one in tmp_path.iterdir()] == ["train.yaml"]
    found = plan_ahead(runs.resolved(config_of(data, tmp_path / "run", batch_documents=16)))
    assert found.steps == 6
    assert found.trial.step_tokens == pytest.approx(
        16 * 2 * (3 + 2), rel=0.3
    )  # spans of 2 to 4 tokens, and two specials
    assert 0 < found.trial.step_seconds < 60


def test_a_plan_counts_validations_on_judged_pairs_alone(data, tmp_path, capsys):
    pairs = [f"main\tcaptions\t2012\t{number}\t{number % 6}\tone {number}\tother\n" for number in range(20)]
    (tmp_path / "sts-dev.csv").write_text("".join(pairs))
    config = config_of(data, tmp_path / "run", batch_documents=16, validation={"stsb": str(tmp_path), "every_steps": 2})
    path = runs.write_config(tmp_path / "train.yaml", train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    assert "validations  3 on judged pairs" in capsys.readouterr().out
    assert plan_ahead(runs.resolved(config)).trial.validation_seconds > 0
