"""`declutr why` of forks of earlier versions, misfitting shards, damaged metrics, and names that no document has."""

import json
import random
import shutil
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import tinyruns as runs
from messages import all_of, says
from textshards import prepare_rows

from declutr.cli.main import main
from declutr.common.config import config_yaml
from declutr.common.errors import UsageError
from declutr.inspection.order import read_order
from declutr.inspection.views import StepReader
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.metrics.metrics import METRICS
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr

STEPS, TAKEN = 12, 9


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    rng = random.Random(0)
    documents = [{"text": " ".join(rng.choices("abcdefghij", k=rng.randint(90, 200)))} for _ in range(30)]
    return prepare_rows(tmp_path_factory.mktemp("forks") / "made", "documents", documents, geometry=runs.GEOMETRY)[0]


@pytest.fixture
def run(shards, tmp_path):
    """A run that has taken nine of twelve steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_yaml(runs.train_config(shards, folder, steps=STEPS)))
    lines = [{"kind": "step", "step": step, "time": 0.0, "batch_digest": 1} for step in range(1, TAKEN + 1)]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_order_of_a_run_that_an_earlier_version_forked_is_not_shown(run, capsys):
    """Its first steps are those of another run."""
    (run / "fork.json").write_text('{"from": "/runs/first", "step": 4}')
    for view in (["--step", "5"], ["--document", "0" * 32]):
        assert main(["why", str(run), *view]) == 1
        says(capsys.readouterr().err, run, "fork.json", "encoder.pretrained=RUN/export")


def test_a_step_whose_line_is_damaged_was_taken(run, capsys):
    lines = (run / METRICS).read_text().splitlines()
    lines[5] = lines[5][:20]
    (run / METRICS).write_text("\n".join(lines) + "\n")
    assert main(["why", str(run), "--step", "6"]) == 0
    shown = capsys.readouterr().out
    says(shown, "the step was taken", "no whole line")
    assert "not taken yet" not in shown


def test_shards_prepared_for_shorter_spans_are_refused_with_the_setting(shards, run, tmp_path, capsys):
    shutil.copytree(shards, tmp_path / "again")
    manifest = json.loads((tmp_path / "again" / "manifest.json").read_text())
    manifest["geometry"] |= {"max_tokens": 8}
    (tmp_path / "again" / "manifest.json").write_text(json.dumps(manifest))
    for view in (["--step", "1"], ["--document", "0" * 32]):
        assert main(["why", str(run), *view, f"data={tmp_path / 'again'}"]) == 1
        says(capsys.readouterr().err, "spans.max_tokens = 16", "at most 8", "add data=FOLDER")


@pytest.mark.parametrize("offset", ["9" * 19, "9" * 5000, "²"])
def test_an_offset_that_no_file_has_names_no_document(shards, run, capsys, offset):
    source = ShardSet(shards, "train").take(np.array([0]))["source"][0].as_py()
    assert main(["why", str(run), "--document", f"{source}:{offset}"]) == 1
    assert "no document matches" in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_named_with_its_setting(run, capsys):
    assert main(["why", str(run), "--step", "1", "data=$NOWHERE_AT_ALL/shards"]) == 1
    says(capsys.readouterr().err, "data = $NOWHERE_AT_ALL/shards", "$NOWHERE_AT_ALL is not set", "add data=FOLDER")


class Needing(Declutr):
    """An objective of a package that refuses an embedding of one number."""

    def __init__(self, config, run, embedding_size):
        super().__init__(config, run, embedding_size)
        raise RuntimeError(f"cannot embed in {embedding_size}")


class NeedingConfig(DeclutrConfig):
    implementation: ClassVar[str] = f"{__name__}:Needing"
    kind: str = "needing"


def test_an_objective_that_cannot_be_made_is_named(run):
    task = read_order(run).tasks[""]
    other = replace(task, config=task.config.model_copy(update={"objective": NeedingConfig()}))
    with pytest.raises(UsageError, match=all_of("objective needing", "RuntimeError: cannot embed in 1")):
        StepReader(other, run)
