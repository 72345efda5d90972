"""Numbers of columns on SentEval's tasks: each way, encoders that are not trained, and data that are refused."""

import json
import shutil

import pytest
import torch
import yaml
from folders import encoder_folder
from papers import arguments
from safetensors.torch import load_file, save_file
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


def test_warnings_of_a_scoring_are_told_with_the_results(item, tmp_path):
    values = yaml.safe_load(item.read_text())
    folder = shutil.copytree(values["encoders"]["CLS"]["name"], tmp_path / "collapsed")
    weights = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(one) for name, one in weights.items()}, folder / "model.safetensors")
    values["encoders"] |= {"none": {"name": str(folder)}}
    shutil.copytree(item.parent / "data", tmp_path / "data")
    (tmp_path / "pooling.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for _ in range(2):  # the second time from files
        assert run(arguments(tmp_path / "pooling.yaml", tmp_path / "work", "--allow-unchecked")) == 0
        found = json.loads((tmp_path / "work/pooling-tiny/results.json").read_text())["warnings"]
        assert found.keys() == {"none"}
        assert any(line.endswith("sampled embeddings are zero") for line in found["none"]["0"])
        assert any(line.startswith("STS12: no correlation in") for line in found["none"]["0"])
        assert not any("published" in line for line in found["none"]["0"])
        text = (tmp_path / "work/pooling-tiny/results.md").read_text()
        assert "Warnings of the scoring:\n\n- none, seed 0: " in text
        for path in (tmp_path / "work/pooling-tiny").glob("*/scores.json"):
            path.unlink()


def test_data_other_than_the_published_ones_are_refused_before_the_work(item, tmp_path, capsys):
    assert run(arguments(item, tmp_path)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 of 2 tasks cannot be scored" in line
    assert "--allow-unchecked" in line
    assert not (tmp_path / "pooling-tiny").exists()


def test_encoders_take_no_settings(item, tmp_path, capsys):
    assert run(arguments(item, tmp_path, "steps=3")) == 1
    assert "trains nothing" in capsys.readouterr().err
