"""Settings of the encoder, the optimizer and validation, readable without torch, which their code needs."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from common.config import Strict


class ProjectionConfig(Strict):
    """The head between pooling and the contrastive loss (DeCLUTR appendix; SimCLR). Dropped at export."""

    kind: Literal["none", "linear", "mlp"] = "none"
    """Two layers, without (linear) or with (mlp) a ReLU between them; none: the pooled embedding itself."""
    size: int = Field(default=128, ge=1)
    """Width of the projected embedding and of the hidden layer."""


class EncoderConfig(Strict):
    """Which encoder is trained and how spans become embeddings."""

    pretrained: str | None = None
    """Name or folder of a masked language model of transformers."""
    scratch: dict[str, Any] | None = None
    """Instead: a transformers config (with `model_type`) whose weights are drawn from the run's seed. Vocabulary size
    and special ids come from the shards' tokenizer."""
    trust_remote_code: bool = False
    """Run code that a pretrained model brings along. Only for models you trust."""
    new_mlm_head: bool = False
    """Where a pretrained encoder brings no MLM head, begin with one whose weights are drawn from the run's seed."""
    pooling: Literal["mean", "cls", "max"] = "mean"
    """Span embedding: mean or maximum over all its tokens (specials included, as released), or its first token."""
    projection: ProjectionConfig = ProjectionConfig()
    layout: Literal["packed", "padded"] = "packed"
    """packed: no padding, attention within spans only, where that is proved equal for this encoder; else padded, which
    a line of the log says. padded: the reference, always."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces every dropout probability of the model; None keeps the model's own."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces the probability of dropping attention weights. Above 0, attention weights are written out one by one,
    which is slow and takes memory: fused kernels know no dropout that could be repeated in another microbatch."""

    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the rest again: less memory, a third more time."""
    compile: bool = False
    """Compile the encoder with torch.compile, once for all lengths. Worth it on a GPU."""

    @model_validator(mode="after")
    def _one_source(self) -> "EncoderConfig":
        if (self.pretrained is None) == (self.scratch is None):
            raise ValueError(
                "give exactly one of `pretrained` (a name or folder) and `scratch` (a transformers config)"
            )
        if self.scratch is not None and "model_type" not in self.scratch:
            raise ValueError("scratch needs `model_type`, for example roberta, bert or modernbert")
        if self.scratch is not None and self.new_mlm_head:
            raise ValueError("new_mlm_head is for a pretrained encoder; from scratch every weight is new")
        return self


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


class ValidationConfig(Strict):
    """When and on what the encoder is scored during training."""

    every_steps: int = Field(default=1000, ge=0)
    """Also before the first and after the last step; 0: never."""
    max_documents: int = Field(default=400, ge=2)
    """Held-out documents that are scored, at most."""
    score: Literal["distant_recall_at_1", "distant_mrr", "recall_at_1", "mrr", "followed"] = "distant_recall_at_1"
    """What "best" means. distant_...: a span finds the one of its own document that is `spans.max_tokens` or more away;
    without: the one that touches it. followed: the score that `declutr evaluate --follow RUN` gives, alongside the
    training, for runs in folders. A run that began when `recall_at_1` was the default keeps that score."""
    patience: int | None = Field(default=None, gt=0)
    """End the run when so many scores in a row are no better than the best, and export that one; null: never. With
    `followed` only checkpoints that were scored count. It may be changed while a run is under way."""
