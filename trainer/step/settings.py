"""Settings of the optimizer, readable without torch."""

from typing import Annotated

from pydantic import Field

from common.config import Strict


class OptimConfig(Strict):
    """AdamW with a slanted triangular schedule; the defaults are DeCLUTR's."""

    lr: float = Field(default=5e-5, gt=0)
    """Highest learning rate, reached when the learning rate stops rising."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-6, gt=0)
    """Term in AdamW's denominator that keeps it above zero."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay. It is not applied to biases and weights of normalisation layers."""
    bias_correction: bool = True
    """Correct the bias of AdamW's moments. false: the released run's optimizer (transformers 3.4), whose first updates
    are about 3 times larger."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Largest total norm of the gradient. Larger gradients are scaled down to it."""
    cut_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the run's steps during which the learning rate rises."""
    ratio: float = Field(default=32.0, ge=1)
    """Ratio of the highest learning rate to the lowest."""
