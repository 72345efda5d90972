"""Settings of SentEval's classifier, and its two published presets."""

from typing import Self

from pydantic import Field

from declutr.common.config import Strict
from declutr.evaluation.senteval.classifier.network import DEFAULT_RATES, OptimizerName


class ClassifierConfig(Strict):
    """Settings of the classifiers. The defaults are the published "default" configuration."""

    num_hidden: int = Field(0, ge=0)
    """Hidden units: 0 is logistic regression, more is Linear-Dropout-Sigmoid-Linear."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the hidden layer, before its sigmoid."""
    optimizer: OptimizerName = "adam"
    """adam or rmsprop, with torch's other defaults."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate; None means the optimizer's default, 1e-3 for adam and 1e-2 for rmsprop."""
    batch_size: int = Field(64, ge=1)
    """Rows per step."""
    tenacity: int = Field(5, ge=0)
    """Tolerated dev scores without a new best, counted in total, not in a row; one more stops the fit."""
    epoch_size: int = Field(4, ge=1)
    """Passes between two dev scores."""
    max_epoch: int = Field(200, ge=0)
    """Last pass after which another block of passes may start."""
    num_folds: int = Field(10, ge=2)
    """k of the cross-validations."""
    decays: tuple[float, ...] = Field((1e-5, 1e-4, 1e-3, 1e-2), min_length=1)
    """Weight decays to choose from, by dev score; the first of equal ones wins."""
    seed: int = Field(1111, ge=0, lt=2**32)
    """Seed of starting weights, orders, held-out rows and dropout; InnerKFold's folds always use 1111."""

    @classmethod
    def official(cls) -> Self:
        """Configuration of the papers' tables: adam, batches of 64, 10 folds."""
        return cls()

    @classmethod
    def prototyping(cls) -> Self:
        """SentEval's quick configuration: rmsprop, batches of 128, 5 folds."""
        return cls(optimizer="rmsprop", batch_size=128, tenacity=3, epoch_size=2, num_folds=5)

    def for_snli(self) -> "ClassifierConfig":
        """Settings for SNLI: one weight decay near 0, a dev score after each pass, 15 passes and one more."""
        return self.model_copy(update={"decays": (1e-9,), "max_epoch": 15, "epoch_size": 1})

    def for_word_content(self) -> "ClassifierConfig":
        """Settings for WordContent with its 1,000 classes: never a hidden layer."""
        return self.model_copy(update={"num_hidden": 0})

    @property
    def rate(self) -> float:
        """The learning rate in effect."""
        return DEFAULT_RATES[self.optimizer] if self.learning_rate is None else self.learning_rate
