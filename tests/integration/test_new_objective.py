"""The objective that docs/guides/new-objective.md builds, extracted from the page, installed by pip, and run."""

import importlib
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tinyruns as runs
from messages import says
from tiny import VOCABULARY, documents

from declutr.common.storage import hash_file

FILES = ("encoder.safetensors", "optimizer.safetensors", "objective.safetensors")
SETTINGS = ["objective.kind=halves", "validation.every_steps=0"]


def runs_ray(test):
    return pytest.mark.ray(pytest.mark.dist(pytest.mark.nightly(test)))


def page():
    return (runs.ROOT / "docs/guides/new-objective.md").read_text()


def write_package(folder):
    """The files of the page."""
    written = re.findall(r"^```\w+ (\S+)\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL)
    for name, text in written:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert len(written) == 4


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with the package, its metadata and its entry point."""
    source, target = tmp_path_factory.mktemp("halves"), tmp_path_factory.mktemp("site")
    write_package(source)
    (arguments,) = re.findall(r"^    pip install (.*) \./halves$", page(), re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "install", "-q", *arguments.split(), "--target", str(target), str(source)]
    subprocess.run(pip, check=True)
    return target


@pytest.fixture(scope="module")
def config(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    changes = {"encoder": {"dropout": 0.1}, "steps": 12, "checkpoint": {"every_steps": 4}}
    values = runs.train_values(data, folder / "run", **changes)
    return runs.write_config(folder / "config.yaml", train=values)


def command(installed, name, config, *settings):
    given = runs.command("declutr.cli.main", config, *settings)
    given["args"][3:4] = [name, str(config)]
    given["env"] = given["env"] | {"PYTHONPATH": os.pathsep.join([str(runs.ROOT / "src"), str(installed)])}
    return given


def run_to_end(*arguments):
    done = subprocess.run(**command(*arguments), timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_its_collator_packs_the_halves_of_a_document(tmp_path, monkeypatch):
    write_package(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    collator = importlib.import_module("halves.objective").HalvesCollator(VOCABULARY, span_tokens=4, seed=0)
    rows = documents([6, 20], max_tokens=4)
    batch = collator.collate(rows, np.zeros(2, np.int64))
    special = [VOCABULARY.bos, VOCABULARY.eos]
    spans = [span.tolist() for span in batch.spans.input_ids.split(batch.spans.lengths.tolist())]
    tokens = [row.as_py() for row in rows.column("tokens")]
    parts = [tokens[0][:3], tokens[0][3:6], tokens[1][:4], tokens[1][4:8]]
    assert spans == [[special[0], *part, special[1]] for part in parts]


@runs_ray
def test_new_objective_trains_and_continues_after_a_kill(installed, config, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_to_end(installed, "train", config, *SETTINGS, f"run={whole}")
    steps = runs.steps_of(whole)
    assert list(steps) == list(range(1, 13))
    assert all(line["loss"] == pytest.approx(line["invariance"] + line["variance"]) for line in steps.values())

    arguments = [*SETTINGS, f"run={killed}", "scaling.num_workers=0"]
    runs.kill_at_checkpoint(command(installed, "train", config, *arguments), killed, 4)
    run_to_end(installed, "train", config, *arguments)
    assert runs.steps_of(killed) == steps
    last = [run / "checkpoints" / "step-00000012" for run in (whole, killed)]
    for name in FILES:
        assert hash_file(last[0] / name) == hash_file(last[1] / name), name
    card = (killed / "export" / "README.md").read_text()
    assert "trained with halves of documents" in card


@runs_ray
def test_its_gradients_do_not_depend_on_workers_or_microbatches(installed, config):
    shown = run_to_end(installed, "verify-gradients", config, *SETTINGS, "--processes", "2")
    assert "float64" in shown
    assert "APART" not in shown


@runs_ray
def test_new_objectives_problems_are_found_before_ray_starts(installed, config):
    done = subprocess.run(
        **command(installed, "train", config, *SETTINGS, "batch_documents=1"), timeout=100, check=False
    )
    assert done.returncode == 1
    says(done.stderr, "batch_documents = 1", "halves", "at least 2")
