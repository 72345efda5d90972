"""Settings: span lengths of the shards, how often a run validates, what the papers' configs say; `train --plan`."""

import json
from dataclasses import replace
from functools import reduce
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
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.run import RESUME_SETTINGS, RunPlan
from declutr.trainer.train import main


@pytest.fixture
def data(tmp_path):
    return shards(tmp_path / "data")


def config(data, **spans):
    return runs.least_config(data=str(data), **({"spans": spans} if spans else {}))


def with_geometry(config, run):
    return module.with_geometry(config, run, RunPlan.of(config).manifests)


def geometry(config):
    return config.spans.num_anchors, config.spans.min_tokens, config.spans.max_tokens


def prepared(data):
    values = json.loads((data / "manifest.json").read_text())["geometry"]
    return values["num_anchors"], min(values["min_tokens"], values["max_tokens"]), values["max_tokens"]


def test_the_shards_give_what_the_user_does_not(data, tmp_path):
    run, (anchors, shortest, longest) = tmp_path / "run", prepared(data)
    assert prepared(data) != geometry(config(data)), "the defaults would hide a fault"
    for spans in ({}, {"num_positives": 1}):
        assert geometry(with_geometry(config(data, **spans), run)) == (anchors, shortest, longest)
    assert geometry(with_geometry(config(data, min_tokens=1), run)) == (anchors, 1, longest)
    shorter = with_geometry(config(data, max_tokens=2), run)
    assert geometry(shorter) == (anchors, 2, 2), "min_tokens is at most max_tokens"
    assert shorter.spans.num_positives == 2
    explicit = config(data, num_anchors=1, min_tokens=2, max_tokens=3)
    assert with_geometry(explicit, run) == explicit
    long = with_geometry(config(data, min_tokens=600), run)
    message = f"spans.min_tokens = 600: it must be at most spans.max_tokens = {longest}"
    assert [line for line in problems(long) if line.startswith(message)]
    missing = config(tmp_path / "nothing")
    assert with_geometry(missing, tmp_path) == missing
    assert any(line.startswith("data = ") for line in problems(missing))


def test_a_batch_in_which_no_anchor_has_a_negative_is_refused(data):
    context, manifest = config(data, num_anchors=1).main.context("drop"), load_manifest(data)
    lonely = replace(context, batch_documents=1)
    several = replace(lonely, spans=lonely.spans.model_copy(update={"num_anchors": 2}))
    for run, settings, refused in (
        (lonely, {}, True), (several, {}, False), (several, {"loss": {"exclude_same_document": True}}, True),
        (context, {}, False), (lonely, {"terms": "mlm"}, False), (lonely, {"queue_size": 4}, False),
    ):  # fmt: skip
        lines = [line for line in DeclutrConfig(**settings).problems(run, manifest) if "batch_documents" in line]
        assert len(lines) == refused
        assert all("batch_documents = 1: an anchor needs" in line and "at least 2" in line for line in lines)


def test_a_run_with_a_checkpoint_keeps_the_values_it_started_with(data, tmp_path):
    started = config(data, num_anchors=2, min_tokens=32, max_tokens=512)
    (tmp_path / RESUME_SETTINGS).write_text(json.dumps(started.resume_settings()))
    assert geometry(with_geometry(config(data), tmp_path)) == prepared(data), "nothing was computed yet"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    again = with_geometry(config(data), tmp_path)
    assert again.hash() == started.hash()
    (tmp_path / RESUME_SETTINGS).write_text("[]")
    assert geometry(with_geometry(config(data), tmp_path)) == prepared(data)


def test_print_config_shows_the_values_of_the_shards(data, tmp_path, capsys):
    train = {"run": "unused", "data": str(data), "encoder": {"from_config": {"model_type": "roberta"}}}
    path = runs.write_config(tmp_path / "config.yaml", train=train)
    assert main([str(path), "--print-config"]) == 0
    output = capsys.readouterr()
    assert "cannot be read" not in output.err
    printed = TrainConfig.model_validate(yaml.safe_load(output.out))
    assert geometry(printed) == prepared(data)
    assert config_yaml(with_geometry(printed, tmp_path)) == config_yaml(printed)
    for place in ("nowhere", "s3://bucket/shards"):  # rows without spans have no values to find
        assert main([str(path), f"data={place}", "spans.max_tokens=64", "--print-config"]) == 0
        says(capsys.readouterr().err, f"data = {place}", "cannot be read", "spans.num_anchors", "spans.min_tokens")
        assert main([str(path), f"data={place}", "objective.kind=simcse", "--print-config"]) == 0
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
    assert -(-steps // (every := steps_between(train.validation.every_steps, steps))) >= 5
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
    assert [steps_between(every, 1000) for every in (200, 0, 1e-300)] == [200, 0, 1]


def test_steps_on_the_command_line_replace_the_epochs_of_a_file(log):
    def numbers(*overrides):
        config = load_config("configs/cpu-small.yaml", "train", TrainConfig, list(overrides))
        return config.steps, config.epochs

    assert numbers("epochs=2") == (None, 2)
    assert numbers("epochs=null") == (None, None)
    assert numbers("steps=null") == numbers("seed=1") == (None, 3)
    assert numbers("epochs=null", "steps=4") == (4, None)
    assert log == []
    assert numbers("steps=16") == (16, None)
    (line,) = log
    says(line, "steps = 16", "epochs = 3")
    with pytest.raises(ValueError, match=all_of("steps = 4", "epochs = 2.0", "not both")):
        numbers("steps=4", "epochs=2")


def test_too_few_validated_rows_are_told_with_a_remedy(tmp_path):
    write_prepared(tmp_path, [[Row("word " * 64)]], geometry=runs.GEOMETRY)
    manifest = load_manifest(tmp_path)

    def remarks(held_out=400, **validation):
        manifests = (manifest.model_copy(update={"totals": {"kept_held_out": held_out}}),)
        config = runs.least_config(validation=validation)
        return validation_remarks(RunPlan(config, Path("run"), {}, {"": manifests}, None, {}))

    assert remarks() == remarks(200) == remarks(every_steps=0, held_out=0) == remarks(every_steps=30) == []
    (rows,) = remarks(199)
    says(rows, "199 held-out documents", "half", "200")
    (limited,) = remarks(1000, max_documents=150)
    assert limited.endswith("increase validation.max_documents")


def simcse(encoder, batch, rate, epochs, supervised=False):  # the table of the README of SimCSE
    settings = {"encoder.pretrained": encoder, "batch_documents": batch, "optim.lr": rate, "epochs": epochs}
    return settings | {"objective.supervised": supervised, "export": "best"}


def visual(weight, rate, temperature):  # the scripts of VisualCSE
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


def test_a_plan_from_real_steps(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(estimate, "_SECONDS", 0.5)
    config = config_of(data, tmp_path / "run", batch_documents=16)
    path = runs.write_config(tmp_path / "train.yaml", train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    output = capsys.readouterr().out
    says(output, "6 of 16 documents", "1.68", "57")
    says(output, "spans of", f"the {sum(LENGTHS) / len(LENGTHS):.0f} tokens of a document")
    assert "validations  none" in output
    assert {path.name for path in tmp_path.iterdir()} == {"data", "train.yaml"}
    trial = try_steps(runs.resolved(config))
    assert trial.step_tokens == pytest.approx(16 * 2 * (3 + 2), rel=0.3)  # spans of 2 to 4 tokens, and two specials
    assert 0 < trial.step_seconds < 60
    pairs = [f"main\tcaptions\t2012\t{number}\t{number % 6}\tone {number}\tother\n" for number in range(20)]
    (tmp_path / "sts-dev.csv").write_text("".join(pairs))
    judged = {"stsb": str(tmp_path), "every_steps": 2}
    config = config_of(data, tmp_path / "run", batch_documents=16, validation=judged)
    runs.write_config(path, train=config.model_dump(mode="json"))
    assert main([str(path), "--plan"]) == 0
    assert "validations  3 on judged pairs" in capsys.readouterr().out
    assert try_steps(runs.resolved(config)).validation_seconds > 0
    assert main([str(path), "--plan", "scaling.num_workers=17"]) == 0, "the first worker has no document, the last has"
