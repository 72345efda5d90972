"""Settings of the encoder, readable without torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict

Positive = Annotated[float, Field(gt=0)]
_MOST_PATCHES = 2**16  # of a clip, and values of a patch: a mistyped number must not take all memory


class ProjectionConfig(Strict):
    """Head between pooling and the contrastive loss (DeCLUTR appendix; SimCLR). It is not exported."""

    kind: Literal["none", "linear", "mlp"] = "none"
    """none: no head, the loss uses the pooled embedding. linear: two linear layers. mlp: two linear layers with a ReLU
    between them."""
    size: int = Field(default=128, ge=1)
    """Width of the projected embedding and of the hidden layer."""


class FrontendConfig(Strict):
    """Patches of images or sounds as input of the encoder's layers, in place of its word embeddings. Not exported."""

    pretrained: str | None = None
    """Name or folder of a ViT of transformers whose patch, CLS and position embeddings are used; null: new ones, drawn
    from the run's seed. Images only."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch in pixels; frames and mel bands of a patch of a spectrogram."""
    image_size: int = Field(default=224, ge=1)
    """Height and width in pixels of the square crops of images."""
    positions: bool = True
    """Add a learned embedding for each place of a patch."""
    mean: float | tuple[float, float, float] | None = None
    """Mean that is subtracted from pixels in [0, 1], one number or one each for red, green and blue, or from log-mel
    values; null: 0.5 for images, 0 for sounds."""
    std: Positive | tuple[Positive, Positive, Positive] | None = None
    """Standard deviation by which the difference is divided, one number or one for each channel; null: 0.5 for images,
    1 for sounds."""

    @model_validator(mode="after")
    def _fits(self) -> "FrontendConfig":
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size = {list(self.patch_size)}: both numbers must be at least 1")
        (high, wide), most = self.patch_size, _MOST_PATCHES
        if high * wide > most:
            raise ValueError(
                f"patch_size = {list(self.patch_size)}: has {high * wide:,} values; at most {most:,} are possible"
            )
        if (patches := (self.image_size // high) * (self.image_size // wide)) > most:
            raise ValueError(
                f"image_size = {self.image_size} makes {patches:,} patches of {list(self.patch_size)}; at most "
                f"{most:,} are possible: make the patches larger or the image smaller"
            )
        return self


class EncoderConfig(Strict):
    """The encoder to train, and how it turns spans into embeddings."""

    pretrained: str | None = None
    """Name or folder of a pretrained masked language model of transformers. Set either this or `from_config`."""
    from_config: dict[str, Any] | None = None
    """Config of transformers (with `model_type`) for an encoder whose weights are drawn from the run's seed, instead of
    `pretrained`. Vocabulary size and special ids come from the shards' tokenizer."""
    trust_remote_code: bool = False
    """Run the code in a pretrained model's files. Only for models you trust."""
    new_mlm_head: bool = False
    """Draw the weights of the MLM head from the run's seed if the pretrained encoder has no MLM head."""
    pooling: Literal["mean", "cls", "max", "mean_without_cls"] = "mean"
    """Span embedding: mean or maximum over all its tokens (specials included, as released); cls: its first token.
    mean_without_cls: mean over all but the first token, as in SCL. sentence-transformers cannot load such an export."""
    projection: ProjectionConfig = ProjectionConfig()
    layout: Literal["packed", "padded"] = "packed"
    """packed: no padding, attention within spans only. Encoders for which this is not proved equal use padded, with a
    line in the log. padded: always pad; the reference."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Probability that replaces every dropout probability of the model; null: keep the model's."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Probability of dropping attention weights, instead of `dropout` or the model's; null: no replacement. Above 0,
    a CPU computes attention weights explicitly, which is slow and needs memory. A GPU does so in float32, in padded
    layouts, and without Triton."""

    num_trainable_layers: int | None = Field(default=None, ge=1)
    """Train only this many of the last layers and what follows them; embeddings and lower layers keep their weights.
    null: train everything."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and recompute the rest. Less memory, a third more time."""
    compile: bool | None = None
    """Compile the encoder's layers, each as one graph for all lengths, and its MLM loss with torch.compile, for
    training alone. null: on GPUs, unless parameters are sharded or no C compiler is installed."""

    @model_validator(mode="after")
    def _one_source(self) -> "EncoderConfig":
        if (self.pretrained is None) == (self.from_config is None):
            raise ValueError(
                "give exactly one of `pretrained` (a name or folder) and `from_config` (a transformers config)"
            )
        if self.from_config is not None and "model_type" not in self.from_config:
            raise ValueError("from_config needs `model_type`, for example roberta, bert or modernbert")
        if self.from_config is not None and self.new_mlm_head:
            raise ValueError("new_mlm_head = True needs `pretrained`; with `from_config`, every weight is new")
        return self
