"""Every step once, in the file and in TensorBoard, through faults of the storage and restarts."""

import json
import math
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from volumes import small_volume

from declutr.trainer.metrics.loggers import TENSORBOARD
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter, read_last_step, read_metrics
from declutr.trainer.step.step import StepMetrics


def measured(step):
    numbers = {
        "terms": {"contrastive": 1.0, "mlm": 2.0},
        "grad_norm": 1.0,
        "lr": 0.1,
        "num_selected": 1,
        "num_tokens": 5,
        "batch_digest": 7,
    }
    return StepMetrics(loss=step / 8, padding_share=0.0, flops=1.0, **numbers)


def take(writer, steps):
    for step in steps:
        writer.step(step, measured(step), {"seconds": 0.5, "mfu": None})


def shown(folder, tag="step/loss"):
    board = EventAccumulator(str(folder / TENSORBOARD), size_guidance={"scalars": 0})
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_metrics_continue_after_a_resume(tmp_path):
    first = MetricsWriter(tmp_path, 0)
    take(first, range(1, 8))
    first.scores(4, {"mrr": 0.5})
    first.close()
    with (tmp_path / METRICS).open("a") as stream:
        stream.write('{"kind": "step", "st')  # a kill
    time.sleep(1.1)  # the names of TensorBoard's files are seconds
    second = MetricsWriter(tmp_path, 5)
    take(second, range(6, 10))
    second.close()
    assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "step"] == list(range(1, 10))
    assert read_last_step(tmp_path / METRICS)["step"] == 9
    assert shown(tmp_path) == [(step, step / 8) for step in range(1, 10)]
    assert shown(tmp_path, "validation/mrr") == [(4, 0.5)]


def test_metrics_that_are_not_finite_are_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    bad = StepMetrics(math.nan, {"contrastive": math.inf, "mlm": 1.0}, -math.inf, 0.1, 1, 5, 0.0, 1.0, 7, skipped=True)
    writer.step(1, bad, {})
    writer.close()

    def refuse(word):
        raise AssertionError(word)

    line = json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
    assert line["loss"] is line["contrastive"] is line["grad_norm"] is None
    assert line["skipped"] is True
    assert shown(tmp_path, "step/skipped") == [(1, 1.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_and_a_read_only_storage_lose_nothing(tmp_path):
    with small_volume(tmp_path / "small", 2) as volume:
        run = volume.path / "run"
        run.mkdir()
        writer = MetricsWriter(run, 0)
        take(writer, range(1, 11))
        writer.flush()
        while writer._loggers[0]._passed < 10:
            time.sleep(0.01)
        volume.fill()
        take(writer, range(11, 200))
        try:
            writer.flush()
            raise AssertionError("the disk was not full")
        except OSError:
            pass
        volume.drain()
        writer.flush()
        volume.read_only(True)
        take(writer, range(200, 210))
        volume.read_only(False)
        writer.close()
        assert [line["step"] for line in read_metrics(run)] == list(range(1, 210))
