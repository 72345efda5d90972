"""What the page of runs shows of the files in their folders."""

import json
import random
import re
import shutil
import time

import pytest
import tinyruns as runs
from pages import checked
from textshards import prepare_rows

from declutr.cli.main import main
from declutr.common.config import config_yaml
from declutr.common.storage import write_json
from declutr.report.charts import short
from declutr.report.record import read_runs
from declutr.report.runs import write_runs_page
from declutr.trainer.driver.failure import GroupFailure
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.step_metrics import StepMetrics

BEGAN = 1_700_000_000.0
HOSTILE = "<script>document.title='run'</script>\u202e"
SPEED = {"tokens_per_second": 5e4, "data_wait_share": 0.01, "mfu": None, "peak_memory_mib": 600.0}
VERDICT = {"score": "mrr", "start": 0.25, "exported": 0.5, "difference": 0.25, "rows": 115, "measurable": True}
VERDICT |= {"interval": [0.125, 0.375], "sentence": "mrr 0.2500 at the start, 0.5000 exported: better"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    rng = random.Random(0)
    documents = [{"text": " ".join(rng.choices("abcdefghij", k=rng.randint(150, 300)))} for _ in range(400)]
    folder = tmp_path_factory.mktemp("report") / "documents"
    return prepare_rows(folder, "documents", documents, geometry={"num_anchors": 2, "max_tokens": 64})[0]


def write_run(folder, shards, steps=700, **changes):
    """A run of two starts with a failure between them, a step that was skipped and one validation in a hundred."""
    folder.mkdir(parents=True)
    spans = {"num_anchors": 2, "num_positives": 2, "min_tokens": 4, "max_tokens": 64}
    values = runs.train_values(shards, folder, steps=steps, **changes)
    (folder / "config.yaml").write_text(config_yaml(TrainConfig.model_validate(values | {"spans": spans})))
    for first in (1, 301):
        if first == 301:
            GroupFailure(f"worker 1 died {HOSTILE}", "death", "trace").log(folder, 300)
        writer = MetricsWriter(folder, first - 1)
        writer.start(first, {"model": 2.0, "workers": 2})
        for step in range(first, 301 if first == 1 else steps + 1):
            if step % 100 == 1:
                part = step / steps
                writer.scores(step - 1, {"alignment": 0.5 + part, "uniformity": -3 * part, "effective_rank": 9 + part})
            loss = float("nan") if step == 500 else 1000.0 if step == 600 else 8.0 / step
            terms = {"contrastive": loss / 2, "mlm": loss / 2}
            measured = StepMetrics(loss, terms, 2.0, 1e-3, 9, 500, 0.125, 1e9, step, skipped=step == 500)
            writer.step(step, measured, SPEED)
        writer.close()
    return folder


@pytest.fixture(scope="module")
def two(shards, tmp_path_factory):
    """Two runs of the same name, of which the first has ended and the other still writes a line."""
    top = tmp_path_factory.mktemp("runs")
    ended, training = write_run(top / "a" / "<b>run", shards), write_run(top / "b" / "<b>run", shards, 650, seed=3)
    summary = {"steps": 700, "ended": "last step", "seconds": 12.0, "verdict": VERDICT, "exported_step": 700}
    write_json(ended / SUMMARY, summary)
    with (ended / METRICS).open("a") as stream:
        alarm = {"kind": "alarm", "step": 40, "time": 1.8e9, "text": f"step 40: collapsed {HOSTILE}"}
        stream.write(json.dumps(alarm) + "\n")
    with (training / METRICS).open("a") as stream:
        stream.write('{"kind": "step", "step": 651, "lo')
    return ended, training


def test_page_has_the_facts_of_the_files(two, tmp_path):
    source = write_runs_page(two, tmp_path).read_text()
    page = checked(source)
    text = page.text
    assert text.startswith("Run report: a/<b>run, b/<b>run")
    assert "<script>document.title='run'</script>⟨U+202E⟩" in text
    assert VERDICT["sentence"] in text
    assert "+0.1250 to +0.3750" in text
    assert "Ended after step 700 of 700 (last step): 12 s." in text
    assert "Not ended: step 650 of 650 is the newest in the metrics" in text
    assert "no verdict before the run ends" in text
    assert text.count("2 start(s), 1 failure(s), 1 step(s) without an update") == 2
    assert "step 40: collapsed" in text
    assert re.search(r"seed 0 3 ", text)
    assert "optim.lr" not in text  # equal in both
    row = re.search(r"loss: a/&lt;b&gt;run</th>(.*?)</tr>", source)[1]
    losses = [8.0 / step for step in range(1, 701) if step not in (500, 600)] + [1000.0]
    figures = (8.0, 8.0 / 700, sum(losses) / 699, 8.0 / 700, 1000.0)
    assert re.findall(r">([^<]+)</td>", row) == [*map(short, figures), "699"]
    words = [attrs["aria-label"] for _, attrs in page.elements if attrs.get("role") == "img"]
    assert "loss: a/<b>run: first 8, last 0.01143, lowest 0.01143, highest 1000;" in words[0]
    assert len(words) == 12
    assert source == write_runs_page(two, tmp_path / "again").read_text()


@pytest.mark.parametrize(("data", "message"), [("gone", "data = gone"), ("$NO/shards", "data = $NO/shards: ")])
def test_page_needs_no_shards_and_names_the_reason(two, tmp_path, data, message):
    shutil.copytree(two[0], tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(re.sub("^data: .*$", f"data: {data}", config, flags=re.MULTILINE))
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert f"Without the length of the run: run: {message}" in checked(page).text
    assert "All settings" in page
    assert "optim.lr" in page


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "missing"], "missing: is no run"),
        (["a", "a"], "a: is named twice"),
        (["a", "damaged/../a"], "a: is named twice"),
        (["a"] * 9, "9 runs: a page compares at most 8"),
        (["damaged"], "config.yaml"),
        (["broken"], "summary.json"),
    ],
)
def test_report_refuses_what_is_no_run(two, tmp_path, capsys, names, message):
    shutil.copytree(two[0], tmp_path / "a")
    shutil.copytree(two[0], tmp_path / "damaged")
    shutil.copytree(two[0], tmp_path / "broken")
    (tmp_path / "damaged" / "config.yaml").write_text("[")
    (tmp_path / "broken" / SUMMARY).write_text('{"steps": "x"}')
    assert main(["report", *(str(tmp_path / name) for name in names), "--output", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "step": 701, "time": NaN, "loss": 1e308}\n{"kind": "step", "step": 702, "loss": -1e308}',
        '{"kind": "step", "step": 1' + "0" * 400 + ', "time": 1e300, "loss": 1' + "0" * 400 + "}",
        '{"kind": "start", "step": 701}\n{"kind": "alarm", "step": 3, "text": 5}',
        '{"kind": "step", "step": 701, ' + ", ".join(f'"<b>{n}": 1' for n in range(500)) + "}",
    ],
)
def test_numbers_of_a_hostile_file_do_not_break_the_page(two, tmp_path, line):
    shutil.copytree(two[0], tmp_path / "run")
    with (tmp_path / "run" / METRICS).open("a") as stream:
        stream.write(line + "\n")
    (tmp_path / "run" / "failures.log").write_text("=== 9999-99-99 99:99:99 X, after step 1: <b>odd</b>\n")
    page = write_runs_page([tmp_path / "run"]).read_text()
    assert "<b>odd</b>" in checked(page).text
    assert page.count("<figure>") < 120


def test_a_run_without_steps_has_a_page(shards, tmp_path):
    folder = write_run(tmp_path / "run", shards)
    (folder / METRICS).write_text("")
    page = write_runs_page([folder]).read_text()
    assert "step 0 of 700 is the newest in the metrics, written never" in page
    (run,) = read_runs([folder])
    assert [event.kind for event in run.events] == ["failure"]


def line(kind, step, seconds, **values):
    return {"kind": kind, "step": step, "time": BEGAN + seconds, **values}


def logged(folder, lines, data="gone"):
    """A run of these lines."""
    (folder / "config.yaml").write_text(f"run: {folder}\ndata: {json.dumps(data)}\n")
    (folder / METRICS).write_text("".join(json.dumps(values) + "\n" for values in lines))
    return folder


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
    logged(tmp_path, [])
    zone("Asia/Kolkata")
    GroupFailure("worker 1 died", "death", "trace").log(tmp_path, 30)
    zone("America/Sao_Paulo")
    (run,) = read_runs([tmp_path])
    (event,) = run.events
    assert (event.kind, event.step, event.text) == ("failure", 30, "worker 1 died")
    assert event.time == pytest.approx(time.time(), abs=60)


def test_counts_and_moments_are_those_of_the_lines(tmp_path):
    corpora = [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]
    steps = [(True, False), (False, True), (False, True), (False, False)]
    lines = [line("start", 1, 1.0, workers=2)]
    lines += [
        line("step", n, n, skipped=main, image_skipped=image, corpus_1_rows=5, corpus_2_rows=15)
        for n, (main, image) in enumerate(steps, 1)
    ]
    lines += [line("start", 5, 8.0, workers=3), line("step", 5, 9.0, corpus_1_rows=5, corpus_2_rows=15)]
    logged(tmp_path, lines, corpora)
    (run,) = read_runs([tmp_path])
    starts = [(event.time - BEGAN, event.step, event.text) for event in run.events if event.kind == "start"]
    assert starts == [(1.0, 0, "2 worker(s)"), (8.0, 4, "3 worker(s)")]
    page = checked(write_runs_page([tmp_path]).read_text()).text
    assert "2 start(s), 0 failure(s), 1 step(s) without an update because of a bad loss, 2 of the task image." in page
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 9.0))
    assert f"step 5 is the newest in the metrics, written {moment}." in page
    assert "No alarm." in page
    assert re.search(r"\b25 25\.00%", page)
    assert re.search(r"\b75 75\.00%", page)
