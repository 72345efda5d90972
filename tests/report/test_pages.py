"""Pages of every kind with hostile texts, in a parser and a browser; the page of runs and its files."""

import json
import random
import re
import shutil
import sys
import time
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest
import tinyruns as runs
from browser import start_browser
from pages import checked
from preparing import prepare_rows

from declutr.adaptation.result import Result, Row, SearchExample, write_adaptation_page
from declutr.adaptation.scores import Verdict
from declutr.cli.main import main
from declutr.common.bootstrap import Comparison
from declutr.common.config import config_yaml
from declutr.common.errors import missing_extra
from declutr.common.storage import write_json
from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.scores import Report, TaskResult
from declutr.report.charts import COLOURS, Curve, draw_curves, draw_histogram, short
from declutr.report.corpus import write_corpus_page
from declutr.report.page import share, shown, write_scores_page
from declutr.report.runs import read_runs, write_runs_page
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver.continuation import SUMMARY
from declutr.trainer.driver.failure import GroupFailure
from declutr.trainer.metrics.metrics import METRICS, MetricsWriter
from declutr.trainer.step.step import StepMetrics

RUNS = "document.title='run'"
HOSTILE = f'<script>{RUNS}</script><img src=x onerror="{RUNS}"></table>\u202e\x00\'"{{{{ 7 * 7 }}}}'
VISIBLE = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\x00", "⟨U+0000⟩")


def result_of(text):
    better = Comparison(0.5, 0.625, 240, (0.0625, 0.1875))
    rows = [Row("start", "start", {"distant": 0.5}, {})]
    rows.append(Row("closed form", "candidate", {"distant": 0.625}, {"distant": better}))
    facts = (text, None, 2, None, [SearchExample(text, (text, False), (text, True))], {"documents": 1234})
    return Result(Verdict("better", better), text, "closed form", "distant", rows, *facts)


@pytest.fixture(scope="module")
def pages(prepared, tmp_path_factory):
    top = tmp_path_factory.mktemp("pages")
    run = top / "run"
    run.mkdir()
    (run / "config.yaml").write_text("data: gone\n")
    lines = [{"kind": "step", "step": step, "time": 1.7e9 + step, "loss": 1 / step, HOSTILE: step} for step in (1, 2)]
    lines.append({"kind": "alarm", "step": 2, "time": 1.7e9, "text": HOSTILE})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    paths = {"adaptation": top / "adaptation.html", "scores": top / "scores.html"}
    write_adaptation_page(result_of(HOSTILE), paths["adaptation"])
    tasks = {task: TaskResult(task, "senteval", {"acc": 50.0}, 10, "identical") for task in ("MR", "CR")}
    reports = {"senteval": Report(HOSTILE, "senteval", tasks)}
    write_scores_page([Evaluated(HOSTILE, "f" * 64, 16, reports, {}, (f"warning {HOSTILE}",))], paths["scores"])
    runs_page = write_runs_page([run], top / "runs")
    return paths | {"corpus": write_corpus_page(prepared[0], top / "corpus"), "runs": runs_page}


def test_hostile_texts_are_texts_of_each_page_and_an_adaptation_has_its_figures(pages, tmp_path):
    for kind, path in pages.items():
        text = checked(path.read_text()).text
        assert f"<script>{RUNS}</script>" in text, kind
        assert "⟨U+202E⟩" in text, kind
        assert kind == "corpus" or text.count(VISIBLE) >= 2, kind
    write_adaptation_page(result_of("It is better."), tmp_path / "report.html")
    text = checked((tmp_path / "report.html").read_text()).text
    parts = ("closed form 62.5 (+12.5 [+6.2, +18.8])", "This is look 2 at a test", "documents 1,234")
    assert [part for part in (*parts, "Before, another document: It is better.") if part not in text] == []


@pytest.mark.slow
def test_nothing_of_a_page_runs_asks_the_network_or_overflows(pages, tmp_path):
    evil = f"<script>{RUNS}</script><p style='color:red'></p><img src='http://127.0.0.1:9/x.png' onerror=\"{RUNS}\">"
    with start_browser(tmp_path / "profile") as browser:
        for kind, path in pages.items():
            for width, dark in ((1200, False), (320, True)):
                browser.open(path, width=width, dark=dark)
                browser.run("document.querySelectorAll('details').forEach(e => e.open = true)")
                assert browser.messages() == [], kind
                assert browser.requests() == [path.as_uri()], kind
                assert browser.run("return document.title") != "run", kind
                assert browser.overflow() == 0, kind
                fills = "return [...document.querySelectorAll('svg [fill*=kept], svg [stroke*=kept]')].map(e => {"
                fills += "const s = getComputedStyle(e); return [s.fill, s.stroke]}).flat()"
                colour = "rgb(90, 169, 220)" if dark else "rgb(31, 111, 168)"  # the style sheet is in force
                assert kind == "scores" or colour in browser.run(fills), kind
                assert all(box[0] > 250 and box[1] > 50 for box in browser.boxes("svg")), kind
            spoilt = tmp_path / f"{kind}.html"
            spoilt.write_text(path.read_text().replace("</main>", f"{evil}</main>"))
            browser.open(spoilt)
            assert browser.run("return document.title") != "run", kind
            assert browser.run("return getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
            assert sum("Content Security Policy" in message for message in browser.messages()) >= 3, kind


def drawn(svg, colour):
    """`(n, 2)` points of each path of a colour, in pixels from the top left."""
    paths = [e.get("d") for e in elements(svg, "path") if COLOURS[colour] in f"{e.attrib}"]
    return [np.array(re.findall(r"([\d.]+) ([\d.]+)", path), np.float64) for path in paths]


def elements(svg, kind):
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith(kind)]


def test_bars_and_curves_are_drawn_at_their_values():
    histogram = ("h", "title", "tokens", 4, {"kept": Counter({4: 400, 8: 100}), "short": Counter({4: 1})}, {32: "room"})
    svg = draw_histogram(*histogram).svg
    bars = [height for path in drawn(svg, "kept") if (height := np.ptp(path[:, 1]))]
    assert bars == pytest.approx([bars[1] * 4, bars[1]], rel=1e-3)
    assert np.ptp(drawn(svg, "short")[0][:, 1]) > 0.5  # a row in 400 can still be seen
    assert re.findall(">(room|1|2|5|10|20|50|100)<", svg) == ["5", "10", "20", "room"]
    assert svg == draw_histogram(*histogram).svg
    steps = np.arange(1.0, 1001)
    chart = draw_curves("c", "loss", [Curve("run", 0, steps, -3 * steps / 1000)], [500])
    texts = [e for e in elements(chart.svg, "text") if e.get("text-anchor") == "end"]
    values = [(float(e.text.replace("−", "-").replace("k", "e3")), float(e.get("y"))) for e in texts]
    unit = (values[-1][1] - values[0][1]) / (values[-1][0] - values[0][0])  # pixels, upwards
    zero = values[0][1] - unit * values[0][0]
    (line,) = [path for path in drawn(chart.svg, "kept") if len(path) == 240 or np.ptp(path[:, 0]) > 200]
    text_middle = 3  # of a number from its base line, pixels
    assert line[0, 1] == pytest.approx(zero + unit * -0.0075 - text_middle, abs=2)
    assert line[-1, 1] == pytest.approx(zero + unit * -2.9925 - text_middle, abs=2)


def test_values_are_shown_as_a_reader_expects():
    values = [None, 1234567, "a\x00b\u202ec\x9bd\n\te\ud800f", "न्\u200dय 👩\u200d🔬"]
    visible = "a⟨U+0000⟩b⟨U+202E⟩c⟨U+009B⟩d\n    e⟨U+D800⟩f"
    assert [shown(value) for value in values] == ["–", "1,234,567", visible, values[3]]
    assert (share(1, 3), share(1, 0)) == ("33.3%", "–")
    numbers = [short(value) for value in (0.0012, 3.14159, 12_000, 3e6, 1e-8)]
    assert numbers == ["0.0012", "3.142", "12k", "3M", "1.0e-08"]


BEGAN = 1_700_000_000.0
SCRIPT = "<script>document.title='run'</script>\u202e"
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
            GroupFailure(f"worker 1 died {SCRIPT}", "death", "trace").log(folder, 300)
        writer = MetricsWriter(folder, first - 1)
        writer.add("start", first, {"model": 2.0, "workers": 2})
        for step in range(first, 301 if first == 1 else steps + 1):
            if step % 100 == 1:
                part = step / steps
                scores = {"alignment": 0.5 + part, "uniformity": -3 * part, "effective_rank": 9 + part}
                writer.add("validation", step - 1, scores)
            loss = float("nan") if step == 500 else 1000.0 if step == 600 else 8.0 / step
            terms = {"contrastive": loss / 2, "mlm": loss / 2}
            measured = StepMetrics(loss, terms, 2.0, 1e-3, 9, 500, 0.125, 1e9, step, skipped=step == 500)
            writer.add("step", step, measured.line() | SPEED)
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
        alarm = {"kind": "alarm", "step": 40, "time": 1.8e9, "text": f"step 40: collapsed {SCRIPT}"}
        stream.write(json.dumps(alarm) + "\n")
    with (training / METRICS).open("a") as stream:
        stream.write('{"kind": "step", "step": 651, "lo')
    return ended, training


def test_page_has_the_facts_of_the_files(two, tmp_path):
    source = write_runs_page(two, tmp_path).read_text()
    page = checked(source)
    text = page.text
    assert text.startswith("Run report: a/<b>run, b/<b>run")
    parts = ("<script>document.title='run'</script>⟨U+202E⟩", VERDICT["sentence"], "+0.1250 to +0.3750", "seed 0 3 ",
             "Ended after step 700 of 700 (last step): 12 s.", "no verdict before the run ends", "step 40: collapsed",
             "Not ended: step 650 of 650 is the newest in the metrics")  # fmt: skip
    assert [part for part in parts if part not in text] == []
    assert text.count("2 start(s), 1 failure(s), 1 step(s) without an update") == 2
    assert "optim.lr" not in text  # equal in both
    row = re.search(r"loss: a/&lt;b&gt;run</th>(.*?)</tr>", source)[1]
    losses = [8.0 / step for step in range(1, 701) if step not in (500, 600)] + [1000.0]
    figures = (8.0, 8.0 / 700, sum(losses) / 699, 8.0 / 700, 1000.0)
    assert re.findall(r">([^<]+)</td>", row) == [*map(short, figures), "699"]
    assert len([attrs["aria-label"] for _, attrs in page.elements if attrs.get("role") == "img"]) == 12
    assert source == write_runs_page(two, tmp_path / "again").read_text()


@pytest.mark.parametrize(("data", "message"), [("gone", "data = gone"), ("$NO/shards", "data = $NO/shards: ")])
def test_page_needs_neither_steps_nor_shards_and_names_the_reason(two, tmp_path, data, message):
    folder = shutil.copytree(two[1], tmp_path / "run")
    (folder / METRICS).write_text("")  # no chart to draw
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub("^data: .*$", f"data: {data}", config, flags=re.MULTILINE))
    assert main(["report", str(folder)]) == 0
    page = (folder / "report" / "report.html").read_text()
    assert f"Without the length of the run: run: {message}" in checked(page).text
    parts = ("step 0 is the newest in the metrics, written never", "All settings", "optim.lr")
    assert [part for part in parts if part not in page] == []
    (run,) = read_runs([folder])
    assert [event.kind for event in run.events] == ["failure"]


def test_report_refuses_what_is_no_run_or_has_no_matplotlib(two, tmp_path, capsys, monkeypatch):
    for name in ("a", "damaged", "broken"):
        shutil.copytree(two[0], tmp_path / name)
    (tmp_path / "damaged" / "config.yaml").write_text("[")
    (tmp_path / "broken" / SUMMARY).write_text('{"steps": "x"}')
    for names, message in (
        (["a", "missing"], "missing: no such file or folder"), (["a", "a"], "a: is named twice"),
        (["a", "damaged/../a"], "a: is named twice"), (["a"] * 9, "9 runs: a page compares at most 8"),
        (["damaged"], "config.yaml"), (["broken"], "summary.json"), (["a"], "pip install matplotlib"),
    ):  # fmt: skip
        if names == ["a"]:
            monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python has a module that is not installed
        assert main(["report", *(str(tmp_path / name) for name in names), "--output", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert ("matplotlib" in error) == (names == ["a"])
        assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert missing_extra("images", "x").endswith("pip install pillow")  # its name at the index is another one


def test_numbers_of_a_hostile_file_do_not_break_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("declutr.report.runs._MOST_CHARTS", 5)
    (tmp_path / "failures.log").write_text("=== 9999-99-99 99:99:99 X, after step 1: <b>odd</b>\n")
    for hostile in (
        '{"kind": "step", "step": 701, "time": NaN, "loss": 1e308}\n{"kind": "step", "step": 702, "loss": -1e308}',
        '{"kind": "step", "step": 1' + "0" * 400 + ', "time": 1e300, "loss": 1' + "0" * 400 + "}",
        '{"kind": "start", "step": 701}\n{"kind": "alarm", "step": 3, "text": 5}',
        '{"kind": "step", "step": 701, ' + ", ".join(f'"<b>{n}": 1' for n in range(500)) + "}",
    ):
        logged(tmp_path, [line("step", step, step, loss=1 / step) for step in (698, 699, 700)])
        with (tmp_path / METRICS).open("a") as stream:
            stream.write(hostile + "\n")
        page = write_runs_page([tmp_path]).read_text()
        assert "<b>odd</b>" in checked(page).text
        assert page.count("<figure>") <= 5 * 5


def line(kind, step, seconds, **values):
    return {"kind": kind, "step": step, "time": BEGAN + seconds, **values}


def logged(folder, lines, data="gone"):
    (folder / "config.yaml").write_text(f"run: {folder}\ndata: {json.dumps(data)}\n")
    (folder / METRICS).write_text("".join(json.dumps(values) + "\n" for values in lines))
    return folder


@pytest.fixture
def zone(monkeypatch):

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
    rows = {"corpus_1_rows": 5, "corpus_2_rows": 15}
    steps = [(True, False), (False, True), (False, True), (False, False)]
    lines = [line("step", n, n, skipped=main, image_skipped=image, **rows) for n, (main, image) in enumerate(steps, 1)]
    lines = [line("start", 1, 1.0, workers=2), *lines, line("start", 5, 8.0, workers=3), line("step", 5, 9.0, **rows)]
    (run,) = read_runs([logged(tmp_path, lines, corpora)])
    starts = [(event.time - BEGAN, event.step, event.text) for event in run.events if event.kind == "start"]
    assert starts == [(1.0, 0, "2 worker(s)"), (8.0, 4, "3 worker(s)")]
    page = checked(write_runs_page([tmp_path]).read_text()).text
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 9.0))
    for part in (
        "2 start(s), 0 failure(s), 1 step(s) without an update because of a bad loss, 2 of the task image.",
        f"step 5 is the newest in the metrics, written {moment}.", "No alarm.", " 25 25.00%", " 75 75.00%",
    ):  # fmt: skip
        assert part in page
