"""Settings of the encoder, readable without torch."""

from typing import Any, Literal

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
