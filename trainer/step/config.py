"""Settings of the optimizer, readable without torch."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict


class OptimConfig(Strict):
    """AdamW and its schedule; the defaults are DeCLUTR's."""

    lr: float = Field(default=5e-5, ge=0)
    """Highest learning rate; 0 (auxiliary tasks only): log the loss alone."""
    schedule: Literal["slanted_triangular", "linear", "cosine", "constant"] = "slanted_triangular"
    """slanted_triangular: up for `cut_fraction`, then down to lr / `ratio`. Others: up for `warmup_ratio`, then linear:
    down to 0; cosine: half a cosine; constant: unchanged."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps with a rising rate, for linear, cosine and constant."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = Field(default=1e-6, gt=0)
    """Term that keeps AdamW's denominator above zero."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, not of biases and norms."""
    bias_correction: bool = True
    """Correct the bias of AdamW's moments; false: as released."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient; null: any."""
    cut_fraction: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps with a rising rate, for slanted_triangular."""
    ratio: float = Field(default=32.0, ge=1)
    """Highest learning rate over the lowest; for slanted_triangular."""

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
