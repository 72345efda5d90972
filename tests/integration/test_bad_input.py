"""Bad input ends with exit code 1 and a line a problem, before Ray starts, with nothing half-written."""

import re
import shutil

import pytest
import ray
import tinyruns as runs
from broken import flip_a_bit
from messages import says
from transformers import AutoModelForMaskedLM, RobertaConfig

from declutr.common.config import load_config
from declutr.common.errors import ConfigError, ShardError
from declutr.pipeline.shards.shards import load_manifest
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.build import load_tokenizer
from declutr.trainer.driver.run import run_training
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import main


@pytest.fixture
def run_bad(data, tmp_path, capsys):
    """Trains with changed settings; returns the lines of the refusal.

    The command itself says them too, and starts Ray beside (tests/integration/test_supervisor.py), which takes seconds.
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


def test_patience_without_scores_or_checkpoints_is_refused(run_bad):
    first, second = run_bad("validation.patience=2")
    says(first, "validation.patience = 2", "export = best")
    says(second, "validation.patience = 2", "validation.every_steps", "above 0")


def test_vocabulary_smaller_than_the_tokenizers_is_refused(run_bad, data):
    size = load_manifest(data).tokenizer.vocab_size
    (line,) = run_bad(f"encoder.from_config.vocab_size={size - 1}")
    says(line, size - 1, size)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.every_steps=0"], ("every_steps = 0", "above 0", "null")),
        (["export=best"], ("export = best", "validation.every_steps", "above 0")),
        (["export=best", "validation.patience=2"], ("validation.every_steps", "above 0")),
        (["validation.patience=0"], ("validation.patience = 0", "greater than 0")),
        (["scaling.fsdp=true", "microbatch_tokens=auto"], ("scaling.fsdp = True", "microbatch_tokens", "auto", "null")),
        (["encoder.from_config.max_position_embeddings=16"], ("spans.max_tokens = 16", "14")),
        (["encoder.from_config.num_attention_heads=3"], "3"),
    ],
)
def test_settings_and_encoders_that_cannot_work_are_refused(run_bad, overrides, message):
    (line,) = run_bad(*overrides)
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


def test_validation_without_held_out_documents_is_refused(run_bad, broken):
    manifest = load_manifest(broken)
    for shard in (shard for shard in manifest.shards if shard.split == "held-out"):
        (broken / shard.name).unlink()
    shards = [shard for shard in manifest.shards if shard.split == "train"]
    totals = manifest.totals | {"kept_held_out": 0}
    (broken / "manifest.json").write_text(
        manifest.model_copy(update={"shards": shards, "totals": totals}).model_dump_json()
    )
    (line,) = run_bad("validation.every_steps=2", folder=broken)
    says(line, "0 held-out documents", "at least 2")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_a_loss_that_is_not_finite_ends_the_run_at_once(data, tmp_path, capsys):
    changes = {
        "optim": {"lr": 1e12},
        "scaling": {"num_workers": 2, "max_failures": 5},
        "checkpoint": {"every_steps": 1},
    }
    values = runs.train_values(data, tmp_path / "run", **changes)
    assert main([str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    said = capsys.readouterr().err
    says(said, "step 2", "loss nan")
    says(said, "optim.lr", "1000000000000.0")
    assert "Traceback" not in said
    assert list(runs.steps_of(tmp_path / "run")) == [1]
    assert not (tmp_path / "run" / "export").exists()
    boards = list((tmp_path / "run" / "tensorboard").iterdir())
    assert len(boards) == 1, "the workers were started again"
