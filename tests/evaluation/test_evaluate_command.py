"""`declutr evaluate` as a user calls it, on small data of one's own."""

import json

import pytest
from browser import start_browser
from folders import encoder_folder
from sentevalsets import write_sets

from evaluation.cli import main

TASKS = "SST2,STS12,STS-B"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sets(tmp_path_factory.mktemp("sets"), rows=16)


def evaluate(folder, output, *arguments):
    own = ["--data", str(folder), "--output", str(output), "--allow-unchecked", "--preset", "prototyping"]
    return main(["evaluate", *arguments, *own, "--tasks", TASKS, "--cpus", "1"])


@pytest.fixture(scope="module")
def scored(folder, tmp_path_factory):
    """Output folder of two encoders by both protocols."""
    model = encoder_folder(tmp_path_factory.mktemp("model"))
    output = tmp_path_factory.mktemp("output")
    assert evaluate(folder, output, "hashed-words:16", str(model), "--protocol", "both") == 0
    return output


def test_two_encoders_give_one_table(scored):
    told = json.loads((scored / "scores.json").read_text())
    assert told["encoders"][0]["encoder"] == "hashed-words:16"
    tables = {block["name"]: block for block in told["tables"]}
    assert {"sts-mean", "sts-wmean", "sts-all", "downstream", "transfer", "geometry"} == set(tables)
    own = [row for row in tables["downstream"]["rows"] if not row["source"]]
    assert len(own) == 2
    assert tables["downstream"]["columns"] == ["SST2", "STS-B"]
    assert all(cell["marked"] for row in own for cell in row["cells"])  # these are not the published data
    assert "not the published data" in (scored / "scores.md").read_text()


def test_what_cannot_be_scored_is_said_and_the_rest_is_scored(folder, tmp_path, capsys):
    assert evaluate(folder, tmp_path, "hashed-words:0", "hashed-words:8") == 1
    shown = capsys.readouterr()
    assert "hashed-words:SIZE" in shown.err
    assert "**hashed-words:8**" in shown.out
    assert main(["evaluate", "hashed-words:8", "--data", str(folder), "--tasks", "STS11"]) == 1
    assert "no task 'STS11'" in capsys.readouterr().err


def test_other_data_are_not_scored_unasked(folder, tmp_path, capsys):
    given = ["evaluate", "hashed-words:8", "--data", str(folder), "--output", str(tmp_path), "--tasks", "STS12"]
    assert main(given) == 1
    assert "REFUSED" in capsys.readouterr().out
    assert "spearman" not in "".join(path.read_text() for path in tmp_path.rglob("*.json") if path.is_file())


def test_the_page_in_a_browser(scored, tmp_path):
    with start_browser(tmp_path) as browser:
        browser.open(scored / "scores.html")
        assert browser.messages() == []
        assert browser.requests() == [(scored / "scores.html").as_uri()]
        widths = (
            "return [...document.querySelectorAll('#sts-all tbody td')].filter(c => c.querySelector('svg')).map(c =>"
            " [parseFloat(c.textContent), c.querySelectorAll('rect')[1].getBoundingClientRect().width /"
            " c.querySelectorAll('rect')[0].getBoundingClientRect().width])"
        )
        cells = browser.run(widths)
        assert len(cells) > 10
        assert all(width == pytest.approx(max(value, 0) / 100, abs=0.01) for value, width in cells)
