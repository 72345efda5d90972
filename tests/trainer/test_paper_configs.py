"""The papers' configs have the papers' settings, or those of the released code where both differ."""

from pathlib import Path

from common.config import load_config
from trainer.setup.config import TrainConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def train_of(name):
    return load_config(str(CONFIGS / f"{name}.yaml"), "train", TrainConfig)


def test_scl_has_about_the_scale_of_the_released_dot_products_and_leaves_cls_out():
    config = train_of("scl")
    assert (config.objective.temperature, config.encoder.pooling) == (4.0, "mean_without_cls")
