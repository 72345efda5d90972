"""Starts, failures, alarms and counts on the page of a run, from its files; a fork has none of its origin."""

import json
import re
import time

import pytest

from declutr.common.storage import write_json
from declutr.report.runs import write_runs_page
from declutr.report.record import read_runs
from declutr.trainer.checkpoints.state import FORK
from declutr.trainer.driver.failure import GroupFailure
from declutr.trainer.driver.summary import FAILURES
from declutr.trainer.metrics.loggers import TENSORBOARD
from declutr.trainer.metrics.metrics import METRICS

BEGAN = 1_700_000_000.0


def line(kind, step, seconds, **values):
    return {"kind": kind, "step": step, "time": BEGAN + seconds, **values}


def write_run(folder, lines, starts=(), data="gone"):
    """A run of these lines, with a file of TensorBoard for each start."""
    (folder / TENSORBOARD).mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {folder}\ndata: {json.dumps(data)}\n")
    (folder / METRICS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    for number, seconds in enumerate(starts):
        (folder / TENSORBOARD / f"events.out.tfevents.{BEGAN + seconds:017.6f}.host{number}.7").touch()
    return folder


def page_of(folder):
    return re.sub(r"<[^>]+>", " ", write_runs_page([folder]).read_text())


def starts_of(folder):
    (run,) = read_runs([folder])
    return [(event.time - BEGAN, event.step, event.text) for event in run.events if event.kind == "start"]


@pytest.fixture
def zone(monkeypatch):
    """Sets the time zone of this process."""

    def set_to(name):
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield set_to
    monkeypatch.undo()
    time.tzset()


def test_a_failure_has_its_moment_in_every_time_zone(tmp_path, zone):
    write_run(tmp_path, [])
    zone("Asia/Kolkata")
    GroupFailure("worker 1 died", "death", "trace").log(tmp_path, 30)
    zone("America/Sao_Paulo")
    (run,) = read_runs([tmp_path])
    (event,) = run.events
    assert (event.kind, event.step, event.text) == ("failure", 30, "worker 1 died")
    assert event.time == pytest.approx(time.time(), abs=60)
    for name in ("-03", "CET"):  # as earlier versions wrote it
        (tmp_path / FAILURES).write_text(f"=== 2024-01-02 03:04:05 {name}, after step 1: died\n")
        local = time.mktime(time.strptime("2024-01-02 03:04:05", "%Y-%m-%d %H:%M:%S"))
        assert [event.time for event in read_runs([tmp_path])[0].events] == [local]


def test_the_newest_line_of_metrics_has_its_own_moment(tmp_path):
    write_run(tmp_path, [line("step", 7, 0.0)])
    GroupFailure("worker 1 died", "death", "trace").log(tmp_path, 7)
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN))
    assert f"step 7 is the newest in the metrics, written {moment}." in page_of(tmp_path)


def test_a_start_that_failed_has_no_workers_of_a_later_one(tmp_path):
    lines = [line("start", 1, 15.0, workers=4), *(line("step", step, 14.0 + step) for step in (1, 2))]
    write_run(tmp_path, lines, starts=[0.0, 10.0, 20.0])
    found = [(0.0, 0, "first worker on host0"), (10.0, 0, "4 worker(s), first worker on host1")]
    assert starts_of(tmp_path) == [*found, (20.0, 2, "first worker on host2")]


def test_starts_without_a_file_of_tensorboard_are_those_of_the_metrics(tmp_path):
    lines = [line("start", 1, 1.0, workers=2), line("step", 1, 2.0), line("start", 2, 5.0, workers=3)]
    write_run(tmp_path, [*lines, line("step", 2, 9.0)])
    told = "no file of TensorBoard"
    assert starts_of(tmp_path) == [(1.0, 0, f"2 worker(s), {told}"), (5.0, 1, f"3 worker(s), {told}")]
    assert "2 start(s)" in page_of(tmp_path)
    bars = re.findall(
        r'<rect[^>]*y="20" width="([\d.]+)%" height="8" class="s0"', write_runs_page([tmp_path]).read_text()
    )
    assert bars == ["12.50", "50.00"]


def test_updates_that_a_task_left_out_are_counted(tmp_path):
    steps = [(True, False), (False, True), (False, True), (False, False)]
    lines = [line("step", n, n, skipped=main, image_skipped=image) for n, (main, image) in enumerate(steps, 1)]
    write_run(tmp_path, lines)
    assert "1 step(s) without an update because of a bad loss, 2 of the task image." in page_of(tmp_path)


def test_a_fork_counts_nothing_of_its_origin(tmp_path):
    corpora = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
    rows = {"corpus_1_rows": 30, "corpus_2_rows": 10, "skipped": True}
    parent = [line("start", 1, 0.0, workers=8), *(line("step", n, n, loss=1.0, **rows) for n in range(1, 41))]
    parent.append(line("alarm", 40, 40.0, alarm="collapse", text="step 40: collapsed"))
    rows = {"corpus_1_rows": 5, "corpus_2_rows": 15, "skipped": False}
    own = [line("start", 41, 5001.0, workers=2), *(line("step", n, 4961.0 + n, loss=1.0, **rows) for n in (41, 42, 43))]
    write_run(tmp_path, [*parent, *own], starts=[5000.0], data=corpora)
    write_json(tmp_path / FORK, {"from": "/runs/first", "step": 40})
    (run,) = read_runs([tmp_path])
    assert run.span_seconds == (BEGAN + 5000.0, BEGAN + 5004.0)
    assert [(event.kind, event.text) for event in run.events] == [("start", "2 worker(s), first worker on host0")]
    page = page_of(tmp_path)
    assert "Forked from /runs/first after its step 40. Not ended: step 43 is the newest" in page
    assert "No alarm." in page
    assert "1 start(s), 0 failure(s), 0 step(s) without an update" in page
    assert re.search(r"\b15 +25\.00%", page)
    assert re.search(r"\b45 +75\.00%", page)
    assert 'class="origin"' in write_runs_page([tmp_path]).read_text()
    (tmp_path / FORK).unlink()
    assert "step 40: collapsed" in page_of(tmp_path)
