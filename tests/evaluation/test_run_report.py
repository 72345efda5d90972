"""The page of `declutr report RUN ...`, in a real browser, against the files of the runs."""

import json
import random
import re
import shutil
from dataclasses import replace

import pytest
import tinyruns as runs
from textshards import prepare_rows

from declutr.cli.main import main
from declutr.common.config import config_yaml
from declutr.common.storage import write_json
from declutr.inspection.order import read_order
from declutr.inspection.runs.line_chart import short, ticks
from declutr.report.runs import write_runs_page
from declutr.report.record import read_runs
from declutr.inspection.runs.span_lengths import span_lengths
from declutr.trainer.driver.failure import GroupFailure
from declutr.trainer.driver.summary import SUMMARY
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.step_metrics import StepMetrics

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
    """Two runs of the same name, of which the first has ended and the other still writes a line; and their page."""
    top = tmp_path_factory.mktemp("runs")
    ended, training = write_run(top / "a" / "<b>run", shards), write_run(top / "b" / "<b>run", shards, 650, seed=3)
    summary = {"steps": 700, "ended": "last step", "seconds": 12.0, "verdict": VERDICT, "exported_step": 700}
    write_json(ended / SUMMARY, summary)
    with (ended / METRICS).open("a") as stream:
        alarm = {"kind": "alarm", "step": 40, "time": 1.8e9, "text": f"step 40: collapsed {HOSTILE}"}
        stream.write(json.dumps(alarm) + "\n")
    with (training / METRICS).open("a") as stream:
        stream.write('{"kind": "step", "step": 651, "lo')
    return ended, training, write_runs_page([ended, training], top / "page")


@pytest.mark.slow
def test_page_loads_without_complaint_and_asks_the_network_for_nothing(browser, two):
    page = two[2]
    for width, dark in ((1200, False), (320, True)):
        browser.open(page, width=width, dark=dark)
        assert browser.messages() == []
        assert browser.requests() == [page.as_uri()]
        assert browser.run("return document.title").startswith("Run report: a/<b>run, b/<b>run")
        assert browser.run("return document.querySelectorAll('script, img, iframe, object, link, b').length") == 0
        assert "<script>document.title='run'</script>⟨U+202E⟩" in browser.run("return document.body.innerText")
        assert browser.overflow() == 0
        browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
        assert browser.overflow() == 0
        charts = browser.boxes("svg.histogram")
        assert len(charts) > 12
        assert all(chart[0] > 0.6 * min(width, 360) and chart[1] > 150 for chart in charts)
        stroke = "return getComputedStyle(document.querySelector('#loss polyline')).stroke"
        assert browser.run(stroke) == ("rgb(90, 169, 220)" if dark else "rgb(31, 111, 168)")
    unnamed = """
        return [...document.querySelectorAll('svg[role=img]')].filter(e =>
            !e.getAttribute('aria-labelledby').split(' ').every(i => document.getElementById(i)?.textContent)).length"""
    assert browser.run(unnamed) == 0
    ids = "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    assert browser.run(ids) == 0


@pytest.mark.slow
def test_curves_are_drawn_at_their_values(browser, two):
    browser.open(two[2])
    script = """
        const chart = [...document.querySelectorAll('figure')].find(f => f.textContent.startsWith(arguments[0]));
        const line = chart.querySelectorAll('polyline')[0].getBoundingClientRect();
        const at = [...chart.querySelectorAll('text.end')].map(t => [t.textContent, t.getBoundingClientRect()]);
        return [line.top, line.bottom, at.map(([v, b]) => [parseFloat(v), b.top + b.height / 2])]"""
    top, bottom, axis = browser.run(script, "uniformity (log")
    (low, low_y), (high, high_y) = axis[0], axis[-1]
    scale = (high_y - low_y) / (high - low)
    assert (top, bottom) == pytest.approx((low_y + scale * (0 - low), low_y + scale * (-3 * 601 / 700 - low)), abs=2.5)


def test_page_has_the_facts_of_the_files(two):
    page = two[2].read_text()
    text = re.sub(r"<[^>]+>", " ", page)
    assert VERDICT["sentence"] in text
    assert "+0.1250 to +0.3750" in text
    assert "Ended after step 700 of 700 (last step): 12 s." in text
    assert "Not ended: step 650 of 650 is the newest in the metrics" in text
    assert "no verdict before the run ends" in text
    assert text.count("2 start(s), 1 failure(s), 1 step(s) without an update") == 2
    assert "step 40: collapsed" in text
    assert re.search(r"seed\s+0\s+3\s", text)
    assert "optim.lr" not in text  # equal in both
    row = re.search(r"loss: a/&lt;b&gt;run</th>(.*?)</tr>", page)[1]
    losses = [8.0 / step for step in range(1, 701) if step not in (500, 600)] + [1000.0]
    figures = (8.0, 8.0 / 700, sum(losses) / 699, 8.0 / 700, 1000.0)
    assert re.findall(r">([^<]+)</td>", row) == [*map(short, figures), "699"]


def no_file(shards):
    next(shards.glob("train-*.arrow")).unlink()


def no_arrow(shards):
    next(shards.glob("train-*.arrow")).write_bytes(b"damaged")


def shorter(shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["geometry"] |= {"max_tokens": 8}
    (shards / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("data", "damage", "told"),
    [
        ("gone", None, "data = gone"),
        ("$NOWHERE_AT_ALL/shards", None, "data = $NOWHERE_AT_ALL/shards: "),
        (None, no_file, "Without its span lengths: run: "),
        (None, no_arrow, "Without its span lengths: run: "),
        (None, shorter, "spans.max_tokens = 64: "),
    ],
)
def test_page_needs_no_shards_and_names_the_reason(two, shards, tmp_path, data, damage, told):
    shutil.copytree(two[0], tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    if damage:
        damage(shutil.copytree(shards, tmp_path / "shards"))
    changed = re.sub("^data: .*$", f"data: {data or tmp_path / 'shards'}", config, flags=re.MULTILINE)
    (tmp_path / "run" / "config.yaml").write_text(changed)
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert told in page
    assert "Span lengths" not in page
    assert "All settings" in page
    assert "optim.lr" in page


def test_span_lengths_follow_their_law_unless_the_settings_differ(two):
    (task,) = read_order(two[0]).tasks.values()
    spans = task.config.spans.model_copy(update={"anchor_beta": (1, 5), "positive_beta": (5, 1)})
    other = replace(task, config=task.config.model_copy(update={"spans": spans}))
    for found in (*span_lengths(task), *span_lengths(other)):
        assert found.distance < 1.63 / found.number**0.5, found.kind  # 1% of the distances are larger
        assert found.found.sum() == pytest.approx(1)
        assert found.law.sum() == pytest.approx(1, abs=1e-6)
        assert abs((found.middle * (found.found - found.law)).sum()) < 1


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a", "missing"], "missing: is no run"),
        (["a", "a"], "a: is named twice"),
        (["a", "damaged/../a"], "a: is named twice"),
        (["a"] * 9, "9 runs: a page compares at most 8"),
        (["damaged"], "config.yaml"),
        (["broken"], "summary.json"),
    ],
)
def test_report_refuses_what_is_no_run(two, tmp_path, capsys, names, told):
    shutil.copytree(two[0], tmp_path / "a")
    shutil.copytree(two[0], tmp_path / "damaged")
    shutil.copytree(two[0], tmp_path / "broken")
    (tmp_path / "damaged" / "config.yaml").write_text("[")
    (tmp_path / "broken" / SUMMARY).write_text('{"steps": "x"}')
    assert main(["report", *(str(tmp_path / name) for name in names), "--output", str(tmp_path / "out")]) == 1
    assert told in capsys.readouterr().err
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
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.99999999999999999.5.<b>x.1").touch()
    page = write_runs_page([tmp_path / "run"]).read_text()
    assert "&lt;b&gt;odd&lt;/b&gt;" in page
    assert page.count("<figure>") < 120


def test_a_run_without_steps_has_a_page(shards, tmp_path):
    folder = write_run(tmp_path / "run", shards)
    (folder / METRICS).write_text("")
    shutil.rmtree(folder / "tensorboard")
    page = write_runs_page([folder]).read_text()
    assert "step 0 of 700 is the newest in the metrics, written never" in page
    (run,) = read_runs([folder])
    assert [event.kind for event in run.events] == ["failure"]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, -3.1), (1e-9, 5e-9), (0.0, 1e6), (-7.0, 2000.0)])
def test_ticks_are_few_round_and_inside(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 6
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in found)
    assert all(float(f"{tick:.4g}") == pytest.approx(tick) for tick in found)
