"""Bad input ends with exit code 1 and a line a problem, before Ray starts, with nothing half-written."""

import os
import re
import shutil

import pytest
import ray
import tinyruns as runs
from broken import flip_a_bit
from messages import says
from transformers import AutoModelForMaskedLM, RobertaConfig

from declutr.common.config import load_config
from declutr.common.errors import ConfigError, RunLockedError, ShardError
from declutr.common.lock import RunLock
from declutr.common.storage import hash_file
from declutr.pipeline.shards.shards import load_manifest
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.build import load_tokenizer
from declutr.trainer.config import TrainConfig
from declutr.trainer.train import main, run_training


@pytest.fixture
def run_bad(data, tmp_path, capsys):
    """Trains with changed settings; returns the lines of the refusal.

    The command itself says them too, and starts Ray beside (the last test here), which takes seconds.
    """

    def go(*overrides, folder=data, **changes):
        values = runs.train_values(folder, tmp_path / "run", **changes)
        config = runs.write_config(tmp_path / "train.yaml", train=values)
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        with pytest.raises(ConfigError) as refused:
            run_training(load_config(str(config), "train", TrainConfig, overrides))
        assert capsys.readouterr().out == ""
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        assert not ray.is_initialized()
        lines = str(refused.value).splitlines()
        assert lines[0].endswith(f"{len(lines) - 1} problem(s)"), lines
        return lines[1:]

    return go


@pytest.fixture
def broken(data, tmp_path):
    """A copy of the shards, to break."""
    return shutil.copytree(data, tmp_path / "shards")


@pytest.fixture
def foreign(tmp_path):
    """A small pretrained model with a tokenizer of its own."""
    tokenizer = train_tokenizer(["other words altogether, again and again"] * 20, 300)
    tokenizer.save_pretrained(tmp_path / "model")
    shape = {key: value for key, value in runs.FROM_CONFIG.items() if key != "model_type"}
    AutoModelForMaskedLM.from_config(RobertaConfig(vocab_size=400, **shape)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["checkpoint.every_steps=0"], [("every_steps = 0", "above 0", "null")]),
        (["export=best"], [("export = best", "validation.every_steps", "above 0")]),
        (["export=best", "validation.patience=2"], [("validation.every_steps", "above 0")]),
        (
            ["validation.patience=2"],
            [("validation.patience = 2", part) for part in ("export = best", "validation.every_steps above 0")],
        ),
        (["validation.patience=0"], [("validation.patience = 0", "greater than 0")]),
        (["scaling.fsdp=true", "microbatch_tokens=auto"], [("scaling.fsdp = True", "microbatch_tokens", "auto")]),
        (["encoder.from_config.max_position_embeddings=16"], [("spans.max_tokens = 16", "14")]),
        (["encoder.from_config.num_attention_heads=3"], ["3"]),
        (["encoder.from_config.vocab_size=299"], [("299", "400")]),
    ],
)
def test_settings_and_encoders_that_cannot_work_are_refused(run_bad, overrides, messages):
    for line, message in zip(run_bad(*overrides), messages, strict=True):
        says(line, message)


def test_shards_of_another_tokenizer_are_refused(run_bad, foreign):
    (line,) = run_bad(encoder={"from_config": None, "pretrained": str(foreign)})
    says(line, f"encoder.pretrained = {foreign}", "tokenizer")
    says(line, "made the shards")


def test_a_tokenizer_that_was_put_in_the_place_of_the_shards_own(run_bad, foreign, broken):
    shutil.copy(foreign / "tokenizer.json", broken / "tokenizer" / "tokenizer.json")
    line, _ = run_bad(folder=broken)
    told = f"the tokenizer in {broken / 'tokenizer'} is not the one that made the shards"
    assert told in line
    with pytest.raises(ShardError, match=re.escape(told)):  # where a run goes on, each worker looks for itself
        load_tokenizer(broken)


def lose_the_footer(path):
    path.write_bytes(path.read_bytes()[:-60] + bytes(60))


@pytest.mark.parametrize(("damage", "facts"), [(lose_the_footer, "not an Arrow"), (flip_a_bit, ("damaged", "SHA-256"))])
def test_a_shard_that_was_changed_in_place_is_named(run_bad, broken, damage, facts):
    path = broken / load_manifest(broken).shards[0].name
    damage(path)
    (line,) = run_bad(folder=broken)
    says(line, path, facts)


def test_shards_without_a_tokenizer_are_refused(run_bad, broken):
    shutil.rmtree(broken / "tokenizer")
    (line,) = run_bad(folder=broken)
    assert str(broken / "tokenizer") in line


def test_a_run_that_another_command_works_on_is_left_alone(data, copied):
    before = {path: hash_file(path) for path in copied.rglob("*") if path.is_file()}
    with RunLock(copied, lambda: None), pytest.raises(RunLockedError, match=f"pid {os.getpid()}"):
        run_training(runs.finished_config(data, copied))
    assert {path: hash_file(path) for path in copied.rglob("*") if path.is_file()} == before
    assert not ray.is_initialized()


def test_problems_are_said_although_ray_has_begun_to_start(data, tmp_path, capsys):
    values = runs.train_values(data, tmp_path / "run", batch_documents=10**6, spans={"max_tokens": 17})
    assert main([str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in said
    assert "batch_documents = 1000000" in said
    assert "spans.max_tokens = 17" in said
    assert not ray.is_initialized()
