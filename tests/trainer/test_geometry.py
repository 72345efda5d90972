"""Settings: span lengths of the shards, how often a run validates, what the papers' configs say; `train --plan`."""

import json
from functools import partial, reduce
from operator import getitem
from pathlib import Path

import pytest
import tinyruns as runs
import yaml
from hypothesis import given
from hypothesis import strategies as st
from madeup import config_of, shards
from messages import all_of, says
from prepared import Row, write_prepared
from shardfolders import LENGTHS
from tinyruns import problems

from declutr.common.config import config_yaml, load_config
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer import run as module
from declutr.trainer.config import TrainConfig
from declutr.trainer.driver import estimate
from declutr.trainer.driver.checks import validation_remarks
from declutr.trainer.driver.estimate import try_steps
from declutr.trainer.metrics.config import steps_between
from declutr.trainer.run import RESUME_SETTINGS, RunPlan
from declutr.trainer.train import main

ENCODER = {"encoder": {"from_config": {"model_type": "roberta"}}}


@pytest.fixture
def data(tmp_path):
    return shards(tmp_path / "data")


def config(data, spans, **given):
    values = {"run": "unused", "data": str(data), **ENCODER, **given}
    return TrainConfig.model_validate(values | ({} if spans is None else {"spans": spans}))


def with_geometry(config, run):
    return module.with_geometry(config, run, RunPlan.of(config).manifests)


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
    assert with_geometry(explicit, run) == explicit


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


def test_print_config_shows_the_values_of_the_shards(data, tmp_path, capsys):
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": str(data), **ENCODER})
    assert main([str(path), "--print-config"]) == 0
    shown = capsys.readouterr()
    assert "cannot be read" not in shown.err
    printed = TrainConfig.model_validate(yaml.safe_load(shown.out))
    assert geometry(printed) == prepared(data)
    assert config_yaml(with_geometry(printed, tmp_path)) == config_yaml(printed)


@pytest.mark.parametrize("place", ["nowhere", "s3://bucket/shards"])
def test_print_config_says_which_values_it_could_not_find(tmp_path, place, capsys):
    """Rows without spans have none to find."""
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": place, **ENCODER})
    assert main([str(path), "spans.max_tokens=64", "--print-config"]) == 0
    says(capsys.readouterr().err, f"data = {place}", "cannot be read", "spans.num_anchors", "spans.min_tokens")
    assert main([str(path), "objective.kind=simcse", "--print-config"]) == 0
    assert capsys.readouterr().err == ""


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
    with pytest.raises(ValueError, match=all_of("steps = 4", "epochs = 2.0", "not both")):
        load_config("configs/cpu-small.yaml", "train", TrainConfig, ["steps=4", "epochs=2"])


def remarks(manifest, held_out=400, **validation):
    manifest = manifest.model_copy(update={"totals": {"kept_held_out": held_out}})
    run = RunPlan(runs.least_config(validation=validation), Path("run"), {}, {"": (manifest,)}, None, {})
    return validation_remarks(run)


def test_too_few_validated_rows_are_told_with_a_remedy(tmp_path):
    write_prepared(tmp_path, [[Row("word " * 64)]], geometry=runs.GEOMETRY)
    told = partial(remarks, load_manifest(tmp_path))
    assert told() == told(200) == told(every_steps=0, held_out=0) == told(every_steps=30) == []
    (rows,) = told(199)
    says(rows, "199 held-out documents", "half", "200")
    (limited,) = told(1000, max_documents=150)
    assert limited.endswith("increase validation.max_documents")


def simcse(encoder, batch, rate, epochs, supervised=False):
    """The table of the README of SimCSE."""
    settings = {"encoder.pretrained": encoder, "batch_documents": batch, "optim.lr": rate, "epochs": epochs}
    return settings | {"objective.supervised": supervised, "export": "best"}


def visual(weight, rate, temperature):
    """The scripts of VisualCSE."""
    image = {"weight": weight, "optim.lr": rate, "objective.temperature": temperature, "batch_documents": 48}
    image |= {"frontend.mean": (0.485, 0.456, 0.406), "frontend.std": (0.229, 0.224, 0.225)}
    return {f"auxiliary_tasks.image.{name}": value for name, value in image.items()}


COPIES = {"objective.mlm_copies": "all"}  # MLM of SimCSE reads all copies
# Dropout 0.1 of attention weights too, the optimizer of transformers 3.4, the gradient of four GPUs.
RELEASED = {
    "encoder.dropout": None, "encoder.attention_dropout": 0.1, "optim.bias_correction": False, "optim.eps": 1e-6,
    "objective.reference_rank_scaling": 4, "optim.schedule": "slanted_triangular", "batch_documents": 16,
}  # fmt: skip
MASKS = {"freq_mask": 48, "time_mask": 192, "shared": True}  # one masked mixture is fed twice
AUDIO = {"auxiliary_tasks.audio.objective.masks": MASKS, "auxiliary_tasks.audio.objective.mixup": 0.5, "export": "best"}
PROJECTOR = {"objective.initializer_range": 0.02}  # drawn as BERT's layers
BERT, ROBERTA = "bert-base-uncased", "roberta-base"
PAPERS = {
    "declutr-base": RELEASED,
    "declutr-small": RELEASED,
    # about the scale of the released dot products
    "scl": {"objective.temperature": 4.0, "encoder.pooling": "mean_without_cls"},
    "scd-bert": PROJECTOR,
    "scd-roberta": PROJECTOR,
    "simcse-unsup": simcse(BERT, 64, 3e-5, 1) | COPIES,
    "simcse-roberta": simcse(ROBERTA, 512, 1e-5, 1) | COPIES,
    "simcse-sup": simcse(BERT, 512, 5e-5, 3, supervised=True) | COPIES,
    "visualcse": simcse(BERT, 64, 3e-5, 1) | visual(0.05, 1e-6, 0.07),
    "visualcse-roberta": simcse(ROBERTA, 128, 2e-5, 1) | visual(0.2, 1e-7, 0.07),
    "visualcse-sup": simcse(BERT, 128, 3e-5, 3, supervised=True) | visual(100.0, 1e-7, 0.05),
    "audiocse": AUDIO,
}


@pytest.mark.parametrize("name", PAPERS)
def test_configs_of_the_papers_have_their_settings(name):
    """No sentence is held back where those of STS-B say which step is exported."""
    config = load_config(f"configs/{name}.yaml", "train", TrainConfig)
    values = config.model_dump()
    for setting, value in PAPERS[name].items():
        assert reduce(getitem, setting.split("."), values) == value, setting
    if "export" in PAPERS[name]:
        prepare = load_config(f"configs/{name}.yaml", "prepare", PipelineConfig)
        assert prepare.validation_fraction == 0
        assert prepare.tokenizer.name == config.encoder.pretrained
        kind = "triples" if name == "visualcse-sup" else "sentences"
        assert not name.startswith("visualcse") or prepare.content.kind == kind


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setattr(estimate, "_SECONDS", 0.5)


@pytest.mark.usefixtures("few_steps")
def test_a_plan_from_real_steps(data, tmp_path, capsys):
    values = config_of(data, tmp_path / "run", batch_documents=16).model_dump(mode="json")
    path = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main([str(path), "--plan"]) == 0
    shown = capsys.readouterr().out
    says(shown, "6 of 16 documents", "1.68", "57")
    says(shown, "spans of", f"the {sum(LENGTHS) / len(LENGTHS):.0f} tokens of a document")
    assert "validations  none" in shown
    assert {one.name for one in tmp_path.iterdir()} == {"data", "train.yaml"}
    trial = try_steps(runs.resolved(config_of(data, tmp_path / "run", batch_documents=16)))
    # spans of 2 to 4 tokens, and two specials
    assert trial.step_tokens == pytest.approx(16 * 2 * (3 + 2), rel=0.3)
    assert 0 < trial.step_seconds < 60


@pytest.mark.usefixtures("few_steps")
def test_a_plan_counts_validations_on_judged_pairs_alone(data, tmp_path, capsys):
    pairs = [f"main\tcaptions\t2012\t{number}\t{number % 6}\tone {number}\tother\n" for number in range(20)]
    (tmp_path / "sts-dev.csv").write_text("".join(pairs))
    config = config_of(data, tmp_path / "run", batch_documents=16, validation={"stsb": str(tmp_path), "every_steps": 2})
    path = runs.write_config(tmp_path / "train.yaml", train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    assert "validations  3 on judged pairs" in capsys.readouterr().out
    assert try_steps(runs.resolved(config)).validation_seconds > 0
