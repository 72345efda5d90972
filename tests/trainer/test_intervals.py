"""How often a run validates and saves: a share of its steps by default, and what is said of too few validations."""

from functools import partial
from pathlib import Path

import pytest
import tinyruns as runs
from hypothesis import given
from hypothesis import strategies as st
from messages import all_of, says
from prepared import Row, write_prepared

from declutr.common.config import load_config
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.driver.remarks import validation_remarks
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.setup.config import TrainConfig


@given(st.integers(5, 10**7), st.integers(10, 1000))
def test_a_share_gives_at_least_five_validations_and_at_most_as_many_as_it_says(total, number):
    every = steps_between(1 / number, total)
    assert (every - 1) * number < total <= every * number
    assert 5 <= -(-total // every) <= number


@pytest.mark.parametrize("config", ["configs/cpu-small.yaml", "configs/adapt.yaml"])
@pytest.mark.parametrize("documents", [300, 1_760, 50_000])
def test_the_configs_for_own_corpora_validate_at_least_five_times(config, documents):
    """Of 2,000 documents 1,760 are trained; adapt reads them once in 14 steps, cpu-small three times in 165."""
    train = load_config(config, "train", TrainConfig)
    steps = max(5, int((train.epochs or 1) * documents) // train.batch_documents)
    every = steps_between(train.validation.every_steps, steps)
    assert -(-steps // every) >= 5
    assert steps_between(train.checkpoint.every_steps, steps) == every


def test_numbers_of_steps_and_shares_are_told_apart():
    def read(value):
        return runs.least_config(validation={"every_steps": value}).validation.every_steps

    assert [read(value) for value in (200, 200.0, 0.05, 0, 0.0, 1, "1", "1e-3")] == [200, 200, 0.05, 0, 0, 1, 1, 0.001]
    assert type(read(200.0)) is int, "the hash of the settings does not depend on how a number is written"
    for wrong in (-1, 1.5, "5%", float("nan"), float("inf"), True, None):
        with pytest.raises(ValueError, match=all_of("200", "share", "below 1")):
            read(wrong)
    for ambiguous in (1.0, "1.0"):
        with pytest.raises(ValueError, match=all_of("write 1 for every step", "share below 1")):
            read(ambiguous)
    assert steps_between(200, 1000) == 200
    assert steps_between(0, 1000) == 0
    assert steps_between(1e-300, 1000) == 1


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["steps=16"], (16, None)),
        (["epochs=2"], (None, 2)),
        (["epochs=null"], (None, None)),
        (["steps=null"], (None, 3)),
        (["epochs=null", "steps=4"], (4, None)),
        (["seed=1"], (None, 3)),
    ],
)
def test_steps_on_the_command_line_replace_the_epochs_of_a_file(overrides, found, log):
    config = load_config("configs/cpu-small.yaml", "train", TrainConfig, overrides)
    assert (config.steps, config.epochs) == found
    assert len(log) == (overrides == ["steps=16"])
    for line in log:
        says(line, "steps = 16", "epochs = 3")


def test_both_on_the_command_line_are_refused():
    with pytest.raises(ValueError, match=all_of("steps = 4", "epochs = 2.0", "not both")):
        load_config("configs/cpu-small.yaml", "train", TrainConfig, ["steps=4", "epochs=2"])


def remarks(manifest, held_out=400, steps=100, **validation):
    manifest = manifest.model_copy(update={"totals": {"kept_held_out": held_out}})
    run = ResolvedRun(runs.least_config(validation=validation), Path("run"), {}, {"": manifest})
    return validation_remarks(run, steps)


def test_too_few_validations_or_rows_are_told_with_a_remedy(tmp_path):
    write_prepared(tmp_path, [[Row("word " * 64)]], geometry=runs.GEOMETRY)
    told = partial(remarks, load_manifest(tmp_path))
    assert told() == told(200) == told(every_steps=0, held_out=0) == []
    (few,) = told(steps=100, every_steps=30)
    says(few, "validation.every_steps = 30", "4 validations", "100 steps")
    assert few.endswith("set validation.every_steps=0.1")
    (short,) = told(steps=4)
    says(short, "epochs", "batch_documents")
    (rows,) = told(199)
    says(rows, "199 held-out documents", "half", "200")
    (limited,) = told(1000, max_documents=150)
    assert limited.endswith("increase validation.max_documents")
