"""The papers' configs have the papers' settings, or those of the released code where both differ."""

from pathlib import Path

import pytest

from declutr.common.config import load_config
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.setup.config import TrainConfig

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
