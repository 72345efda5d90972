"""Numbers of columns on SentEval's tasks: each way, encoders that are not trained, and data that are refused."""

import json
import shutil

import pytest
import yaml
from folders import encoder_folder
from papers import arguments
from sentevalsets import write_sets

from declutr.cli.reproduce import run


@pytest.fixture(scope="module")
def item(tmp_path_factory):
    """An item that scores two poolings of an encoder."""
    folder = tmp_path_factory.mktemp("encoders")
    (folder / "encoder").mkdir()
    name = str(encoder_folder(folder / "encoder", "bert"))
    write_sets(folder / "data" / "senteval")
    columns = {
        "mean": {"tasks": ["STS12"]},
        "wmean": {"tasks": ["STS12"], "number": "wmean"},
        "all": {"tasks": ["STS12", "STSBenchmark"], "number": "all"},
        "dev": {"tasks": ["STSBenchmark"], "number": "all_dev"},
        "both": {"mean_of": ["mean", "all"]},
    }
    made = {
        "title": "Pooling",
        "source": "a paper, Table 1",
        "says": "The mean is better.",
        "encoders": {"CLS": {"name": name, "pooling": "cls"}, "mean": {"name": name, "pooling": "mean"}},
        "columns": columns,
        "scales": {"tiny": {"preset": "prototyping"}},
    }
    path = folder / "pooling.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path


def test_columns_are_the_numbers_of_the_evaluation(item, tmp_path):
    assert run(arguments(item, tmp_path, "--allow-unchecked")) == 0
    found = json.loads((tmp_path / "pooling-tiny/results.json").read_text())
    numbers = {column: cells["mean"]["0"] for column, cells in found["numbers"].items()}
    (folder,) = (tmp_path / "pooling-tiny/mean-0/senteval").glob("*-????????")
    units = {path.name: json.loads(path.read_text())["scores"] for path in folder.glob("STS*.json")}
    years, pairs = units["STS12.json"], units["STSBenchmark.cosine.json"]
    assert numbers["mean"] == pytest.approx(100 * years["spearman.mean"])
    assert numbers["wmean"] == pytest.approx(100 * years["spearman.wmean"])
    assert numbers["all"] == pytest.approx(50 * (years["spearman.all"] + pairs["spearman"]))
    assert numbers["dev"] == pytest.approx(100 * pairs["devspearman"])
    assert numbers["both"] == pytest.approx((numbers["mean"] + numbers["all"]) / 2)
    assert "STSBenchmark.json" not in units, "a regression that no column needs"
    assert found["numbers"]["mean"]["CLS"] != found["numbers"]["mean"]["mean"]
    assert any("STS12" in one for one in found["not_published_data"])


def test_other_data_in_the_same_place_are_scored_anew(item, tmp_path):
    shutil.copytree(item.parent, tmp_path / "item")
    given = arguments(tmp_path / "item" / item.name, tmp_path, "--allow-unchecked")
    results = tmp_path / "pooling-tiny/results.json"
    assert run(given) == 0
    before = json.loads(results.read_text())["numbers"]
    write_sets(tmp_path / "item/data/senteval", seed=1)
    assert run(given) == 0
    now = json.loads(results.read_text())["numbers"]
    assert [one for one in now if now[one] == before[one]] == []


def test_data_other_than_the_published_ones_are_refused_before_the_work(item, tmp_path, capsys):
    assert run(arguments(item, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 of 2 tasks cannot be scored" in line
    assert "--allow-unchecked" in line
    assert not (tmp_path / "pooling-tiny").exists()


def test_encoders_take_no_settings(item, tmp_path, capsys):
    assert run(arguments(item, tmp_path, "steps=3")) == 1
    assert "trains nothing" in capsys.readouterr().err
