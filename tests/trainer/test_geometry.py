"""Settings: span lengths of the shards, how often a run validates, and what the papers' configs say."""

import json
from functools import partial
from pathlib import Path

import pytest
import tinyruns as runs
import yaml
from hypothesis import given
from hypothesis import strategies as st
from madeup import shards
from messages import all_of, says
from prepared import Row, write_prepared

from declutr.common.config import config_yaml, load_config
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.driver.checks import problems
from declutr.trainer.driver.remarks import validation_remarks
from declutr.trainer.driver.resolved import ResolvedRun, find_shards
from declutr.trainer.metrics.config import steps_between
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
    """Rows without spans have none to find."""
    path = runs.write_config(tmp_path / "config.yaml", train={"run": "unused", "data": place, **ENCODER})
    shown = runs.run_command("declutr.trainer.train", path, "spans.max_tokens=64", "--print-config")
    assert shown.returncode == 0, shown.stderr
    says(shown.stderr, f"data = {place}", "cannot be read")
    says(shown.stderr, "spans.num_anchors", "spans.min_tokens")
    if place == "nowhere":
        shown = runs.run_command("declutr.trainer.train", path, "objective.kind=simcse", "--print-config")
        assert (shown.returncode, shown.stderr) == (0, "")


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


VISUAL = {  # encoder, texts a step, their rate, epochs, weight, rate and temperature of the images
    "visualcse": ("bert-base-uncased", 64, 3e-5, 1, 0.05, 1e-6, 0.07),
    "visualcse-roberta": ("roberta-base", 128, 2e-5, 1, 0.2, 1e-7, 0.07),
    "visualcse-sup": ("bert-base-uncased", 128, 3e-5, 3, 100.0, 1e-7, 0.05),
}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def train_of(name):
    return load_config(str(CONFIGS / f"{name}.yaml"), "train", TrainConfig)


def prepare_of(name):
    return load_config(str(CONFIGS / f"{name}.yaml"), "prepare", PipelineConfig)


@pytest.mark.parametrize("name", ["declutr-base", "declutr-small"])
def test_declutr_drops_and_updates_as_released(name):
    """Dropout 0.1 of attention weights too, the optimizer of transformers 3.4, the gradient of four GPUs."""
    config = train_of(name)
    assert (config.encoder.dropout, config.encoder.attention_dropout) == (None, 0.1)
    assert (config.optim.bias_correction, config.objective.reference_rank_scaling) == (False, 4)
    assert (config.optim.eps, config.optim.schedule, config.batch_documents) == (1e-6, "slanted_triangular", 16)


def test_scl_has_about_the_scale_of_the_released_dot_products_and_leaves_cls_out():
    config = train_of("scl")
    assert (config.objective.temperature, config.encoder.pooling) == (4.0, "mean_without_cls")


@pytest.mark.parametrize("name", ["scd-bert", "scd-roberta"])
def test_scd_draws_its_projector_as_bert(name):
    assert train_of(name).objective.initializer_range == 0.02


@pytest.mark.parametrize(
    ("name", "encoder", "batch", "rate", "epochs"),
    [
        ("simcse-unsup", "bert-base-uncased", 64, 3e-5, 1),
        ("simcse-roberta", "roberta-base", 512, 1e-5, 1),
        ("simcse-sup", "bert-base-uncased", 512, 5e-5, 3),
    ],
)
def test_simcse_has_the_table_of_its_readme(name, encoder, batch, rate, epochs):
    config = train_of(name)
    assert config.encoder.pretrained == prepare_of(name).tokenizer.name == encoder
    assert (config.batch_documents, config.optim.lr, config.epochs) == (batch, rate, epochs)
    assert (config.objective.mlm_copies, config.objective.supervised) == ("all", name == "simcse-sup")


@pytest.mark.parametrize("name", ["simcse-unsup", "simcse-roberta", "simcse-sup", *VISUAL, "audiocse"])
def test_no_sentence_is_held_back_where_stsb_validates(name):
    assert (prepare_of(name).validation_fraction, train_of(name).export) == (0, "best")


@pytest.mark.parametrize("name", VISUAL)
def test_visualcse_has_the_settings_of_its_scripts(name):
    config, image = train_of(name), train_of(name).auxiliary_tasks["image"]
    texts = config.encoder.pretrained, config.batch_documents, config.optim.lr, config.epochs
    assert (*texts, image.weight, image.optim.lr, image.objective.temperature) == VISUAL[name]
    assert prepare_of(name).tokenizer.name == config.encoder.pretrained
    assert prepare_of(name).content.kind == ("triples" if name == "visualcse-sup" else "sentences")
    assert config.objective.supervised == (name == "visualcse-sup")
    assert image.batch_documents == 48
    assert (image.frontend.mean, image.frontend.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_audiocse_feeds_one_masked_mixture_twice():
    objective = train_of("audiocse").auxiliary_tasks["audio"].objective
    assert objective.masks.model_dump() == {"freq_mask": 48, "time_mask": 192, "shared": True}
    assert objective.mixup == 0.5
