"""Span lengths and anchors that come from the shards, unless the user or a started run gives others."""

import json

import pytest
import tinyruns as runs
import yaml
from madeup import shards
from messages import all_of, says

from declutr.common.config import config_yaml
from declutr.trainer.driver.checks import problems
from declutr.trainer.driver.resolved import find_shards
from declutr.trainer.setup import geometry as module
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.geometry import RESUME_SETTINGS

ENCODER = {"encoder": {"from_config": {"model_type": "roberta"}}}


@pytest.fixture
def data(tmp_path):
    return shards(tmp_path / "data")


def config(data, spans, **given):
    values = {"run": "unused", "data": str(data), **ENCODER, **given}
    return TrainConfig.model_validate(values | ({} if spans is None else {"spans": spans}))


def with_geometry(config, run):
    return module.with_geometry(config, run, find_shards(config).manifests)


def geometry(found):
    return found.spans.num_anchors, found.spans.min_tokens, found.spans.max_tokens


def prepared(data):
    found = json.loads((data / "manifest.json").read_text())["geometry"]
    return found["num_anchors"], min(found["min_tokens"], found["max_tokens"]), found["max_tokens"]


def test_the_shards_give_what_the_user_does_not(data, tmp_path):
    run = tmp_path / "run"
    ours = prepared(data)
    assert ours != geometry(config(data, None)), "the defaults would hide a fault"
    assert geometry(with_geometry(config(data, None), run)) == ours
    assert geometry(with_geometry(config(data, {"num_positives": 1}), run)) == ours
    assert geometry(with_geometry(config(data, {"min_tokens": 1}), run)) == (ours[0], 1, ours[2])
    shorter = with_geometry(config(data, {"max_tokens": 2}), run)
    assert geometry(shorter) == (ours[0], 2, 2), "min_tokens is at most max_tokens"
    assert shorter.spans.num_positives == 2
    explicit = config(data, {"num_anchors": 1, "min_tokens": 2, "max_tokens": 3})
    assert with_geometry(explicit, run) is explicit


def test_a_run_with_a_checkpoint_keeps_the_values_it_started_with(data, tmp_path):
    started = config(data, {"num_anchors": 2, "min_tokens": 32, "max_tokens": 512})
    (tmp_path / RESUME_SETTINGS).write_text(json.dumps(started.resume_settings()))
    assert geometry(with_geometry(config(data, None), tmp_path)) == prepared(data), "nothing was computed yet"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    again = with_geometry(config(data, None), tmp_path)
    assert again.hash() == started.hash()
    (tmp_path / RESUME_SETTINGS).write_text("[]")
    assert geometry(with_geometry(config(data, None), tmp_path)) == prepared(data)


def test_without_shards_the_checks_name_the_problem(tmp_path):
    missing = config(tmp_path / "nothing", None)
    assert with_geometry(missing, tmp_path) == missing
    assert any(line.startswith("data = ") for line in problems(missing))


def test_a_shortest_span_above_the_shards_longest_is_refused(data, tmp_path):
    long = with_geometry(config(data, {"min_tokens": 600}), tmp_path)
    message = f"spans.min_tokens = 600: it must be at most spans.max_tokens = {prepared(data)[2]}"
    assert [line for line in problems(long) if line.startswith(message)]
    with pytest.raises(ValueError, match=all_of("min_tokens = 9", "at most", "max_tokens = 8")):
        config(data, {"min_tokens": 9, "max_tokens": 8})


@pytest.mark.slow
def test_print_config_shows_the_values_of_the_shards(data, tmp_path):
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": str(data), **ENCODER})
    shown = runs.run_command("declutr.trainer.train", path, "--print-config")
    assert shown.returncode == 0, shown.stderr
    assert "cannot be read" not in shown.stderr
    printed = TrainConfig.model_validate(yaml.safe_load(shown.stdout))
    assert geometry(printed) == prepared(data)
    assert config_yaml(with_geometry(printed, tmp_path)) == config_yaml(printed)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["nowhere", "s3://bucket/shards"])
def test_print_config_says_which_values_it_could_not_find(tmp_path, place):
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": place, **ENCODER})
    shown = runs.run_command("declutr.trainer.train", path, "spans.max_tokens=64", "--print-config")
    assert shown.returncode == 0, shown.stderr
    says(shown.stderr, f"data = {place}", "cannot be read")
    says(shown.stderr, "spans.num_anchors", "spans.min_tokens")


@pytest.mark.slow
def test_rows_without_spans_have_no_values_to_find(tmp_path):
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": "nowhere", **ENCODER})
    shown = runs.run_command("declutr.trainer.train", path, "objective.kind=simcse", "--print-config")
    assert (shown.returncode, shown.stderr) == (0, "")
