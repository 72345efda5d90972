"""Settings of the optimizer, readable without torch."""

from typing import Annotated

from pydantic import Field

from common.config import Strict


class OptimConfig(Strict):
    """AdamW with a slanted triangular schedule; the defaults are DeCLUTR's."""

    lr: float = Field(default=5e-5, gt=0)
    """Highest learning rate, reached at the end of the rise."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-6, gt=0)
    """Term in AdamW's denominator that keeps it above zero."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; not on biases and LayerNorm weights."""
    bias_correction: bool = True
    """False: the released run's optimizer (transformers 3.4), whose first updates are about 3 times larger."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this total norm."""
    cut_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the run's steps during which the learning rate rises."""
    ratio: float = Field(default=32.0, ge=1)
    """How much smaller the lowest learning rate is than the highest."""
