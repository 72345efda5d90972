"""Settings of the optimizer, readable without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict


class OptimConfig(Strict):
    """AdamW and its schedule; the defaults are DeCLUTR's."""

    lr: float = Field(default=5e-5, ge=0)
    """Highest learning rate, reached when the learning rate stops rising. 0 (auxiliary tasks only): log the loss, do
    not train."""
    schedule: Literal["slanted_triangular", "linear", "cosine", "constant"] = "slanted_triangular"
    """Learning rate over the steps. slanted_triangular: up for `cut_fraction` of the run, then down to lr / `ratio`.
    linear, cosine, constant: those of transformers, from 0 up for `warmup_ratio` of the run, then down to 0 in a
    line or half a cosine, or constant."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the run's steps during which the learning rate rises from 0; for linear, cosine and constant."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-6, gt=0)
    """Term in AdamW's denominator that keeps it above zero."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay. It is not applied to biases and weights of normalisation layers."""
    bias_correction: bool = True
    """Correct the bias of AdamW's moments. false: the released run's optimizer (transformers 3.4), whose first updates
    are about 3 times larger."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest total norm of the gradient. Larger gradients are scaled down to it. null: gradients are not scaled."""
    cut_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the run's steps during which the learning rate rises; for slanted_triangular."""
    ratio: float = Field(default=32.0, ge=1)
    """Ratio of the highest learning rate to the lowest; for slanted_triangular."""

    @model_validator(mode="after")
    def _fits_schedule(self) -> "OptimConfig":
        slanted = self.schedule == "slanted_triangular"
        if slanted and self.warmup_ratio:
            raise ValueError(
                f"warmup_ratio = {self.warmup_ratio} has no effect with schedule = slanted_triangular; set "
                "cut_fraction, or schedule to linear, cosine or constant"
            )
        if not slanted and (self.cut_fraction, self.ratio) != (0.1, 32.0):
            raise ValueError(
                f"cut_fraction = {self.cut_fraction} and ratio = {self.ratio} have no effect with schedule = "
                f"{self.schedule}; remove them, or set warmup_ratio"
            )
        return self
