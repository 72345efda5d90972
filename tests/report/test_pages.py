"""Every kind of page with hostile texts, in a parser and a browser; their charts; a command without matplotlib."""

import json
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import start_browser
from messages import says
from pages import checked

from declutr.adaptation.result import Result, Row, SearchExample, write_adaptation_page
from declutr.adaptation.scores import Verdict
from declutr.cli.main import main
from declutr.common.bootstrap import Comparison
from declutr.evaluation.senteval.runner.harness import Evaluated
from declutr.evaluation.senteval.scores.results import Report, TaskResult
from declutr.report.charts import COLOURS, Curve, draw_curves, draw_histogram, draw_intervals, short
from declutr.report.corpus import write_corpus_page
from declutr.report.page import share, shown, write_scores_page
from declutr.report.runs import write_runs_page

RUNS = "document.title='run'"
HOSTILE = f'<script>{RUNS}</script><img src=x onerror="{RUNS}"></table>\u202e\x00\'"{{{{ 7 * 7 }}}}'
VISIBLE = HOSTILE.replace("\u202e", "⟨U+202E⟩").replace("\x00", "⟨U+0000⟩")


def result_of(text):
    better = Comparison(0.5, 0.625, 240, (0.0625, 0.1875))
    rows = [
        Row("start", "start", {"distant": 0.5}, {}),
        Row("closed form", "candidate", {"distant": 0.625}, {"distant": better}),
    ]
    example = SearchExample(text, (text, False), (text, True))
    return Result(
        Verdict("better", better),
        text,
        "closed form",
        "distant",
        rows,
        text,
        None,
        2,
        None,
        [example],
        {"documents": 1234},
    )


def evaluated(name):
    tasks = {task: TaskResult(task, "senteval", {"acc": 50.0}, 10, "identical") for task in ("MR", "CR")}
    return Evaluated(name, "f" * 64, 16, {"senteval": Report(name, "senteval", tasks)}, {}, (f"warning {name}",))


@pytest.fixture(scope="module")
def pages(prepared, tmp_path_factory):
    """One page of each kind, by its kind."""
    top = tmp_path_factory.mktemp("pages")
    run = top / "run"
    run.mkdir()
    (run / "config.yaml").write_text("data: gone\n")
    lines = [{"kind": "step", "step": step, "time": 1.7e9 + step, "loss": 1 / step, HOSTILE: step} for step in (1, 2)]
    lines.append({"kind": "alarm", "step": 2, "time": 1.7e9, "text": HOSTILE})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    paths = {"adaptation": top / "adaptation.html", "scores": top / "scores.html"}
    write_adaptation_page(result_of(HOSTILE), paths["adaptation"])
    write_scores_page([evaluated(HOSTILE)], paths["scores"])
    return paths | {
        "corpus": write_corpus_page(prepared[0], top / "corpus"),
        "runs": write_runs_page([run], top / "runs"),
    }


def test_hostile_texts_are_texts_of_each_page(pages):
    for kind, path in pages.items():
        page = checked(path.read_text())
        assert f"<script>{RUNS}</script>" in page.text, kind
        assert "⟨U+202E⟩" in page.text, kind
    for kind in ("adaptation", "scores", "runs"):
        assert checked(pages[kind].read_text()).text.count(VISIBLE) >= 2, kind


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


def test_a_page_says_the_figures_of_an_adaptation(tmp_path):
    write_adaptation_page(result_of("It is better."), tmp_path / "report.html")
    page = checked((tmp_path / "report.html").read_text())
    assert "closed form 62.5 (+12.5 [+6.2, +18.8])" in page.text
    assert "This is look 2 at a test" in page.text
    assert "documents 1,234" in page.text
    assert "Before, another document: It is better." in page.text


def drawn(svg, colour):
    """`(n, 2)` points of each path of a colour, in pixels from the top left."""
    paths = [
        e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("path") and COLOURS[colour] in f"{e.attrib}"
    ]
    return [np.array(re.findall(r"([\d.]+) ([\d.]+)", path.get("d")), np.float64) for path in paths]


def heights(svg):
    """Pixels from the top of the number 0, and of a unit upwards."""
    texts = [e for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("text") and e.get("text-anchor") == "end"]
    values = [(float(e.text.replace("−", "-").replace("k", "e3")), float(e.get("y"))) for e in texts]
    slope = (values[-1][1] - values[0][1]) / (values[-1][0] - values[0][0])
    return values[0][1] - slope * values[0][0], slope


def test_bars_and_curves_are_drawn_at_their_values():
    counts = np.array([0, 0, 400, 100, 0, 0, 0, 0])
    series = {"kept": counts, "short": np.where(counts == 400, 1, 0)}
    svg = draw_histogram("h", "title", "tokens", np.exp2(np.arange(9.0)), series, {32: "room"}).svg
    bars = [height for path in drawn(svg, "kept") if (height := np.ptp(path[:, 1]))]
    assert bars == pytest.approx([bars[1] * 4, bars[1]], rel=1e-3)
    assert np.ptp(drawn(svg, "short")[0][:, 1]) > 0.5  # a row in 400 can still be seen
    assert re.findall(">(room|1|2|5|10|20|50|100)<", svg) == ["5", "10", "20", "room"]
    assert svg == draw_histogram("h", "title", "tokens", np.exp2(np.arange(9.0)), series, {32: "room"}).svg
    steps = np.arange(1.0, 1001)
    chart = draw_curves("c", "loss", [Curve("run", 0, steps, -3 * steps / 1000)], [500])
    zero, unit = heights(chart.svg)
    (line,) = [path for path in drawn(chart.svg, "kept") if len(path) == 240 or np.ptp(path[:, 0]) > 200]
    text_middle = 3  # of a number from its base line, pixels
    assert line[0, 1] == pytest.approx(zero + unit * -0.0075 - text_middle, abs=2)
    assert line[-1, 1] == pytest.approx(zero + unit * -2.9925 - text_middle, abs=2)
    assert chart.words == "run: first -0.003, last -3, lowest -3, highest -0.003"
    svg = draw_intervals("i", "title", [("a", 2.0, (1.0, 3.0)), ("b", -1.0, None)]).svg
    (interval,) = [path for path in drawn(svg, "kept") if len(path) == 2 and np.ptp(path[:, 0]) > 20]
    (origin,) = [path for path in drawn(svg, "muted") if len(path) == 2 and np.ptp(path[:, 1]) > 20]
    assert interval[0, 0] - origin[0, 0] == pytest.approx(np.ptp(interval[:, 0]) / 2, rel=1e-3)


def test_values_are_shown_as_a_reader_expects():
    values = [None, 1234567, "a\x00b\u202ec\x9bd\n\te\ud800f", "न्\u200dय 👩\u200d🔬"]
    assert [shown(value) for value in values[:2]] == ["–", "1,234,567"]
    assert shown(values[2]) == "a⟨U+0000⟩b⟨U+202E⟩c⟨U+009B⟩d\n    e⟨U+D800⟩f"
    assert shown(values[3]) == values[3]
    assert (share(1, 3), share(1, 0)) == ("33.3%", "–")
    assert [short(value) for value in (0.0012, 3.14159, 12_000, 3e6, 1e-8)] == [
        "0.0012",
        "3.142",
        "12k",
        "3M",
        "1.0e-08",
    ]


def test_without_matplotlib_a_report_is_refused_with_the_extra(prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as Python has a module that is not installed
    assert main(["report", str(prepared[0]), "--output", str(tmp_path / "out")]) == 1
    says(capsys.readouterr().err, "matplotlib", "pip install 'declutr-ray[report]'")
    assert not (tmp_path / "out").exists()
