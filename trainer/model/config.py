"""Settings of the encoder, readable without torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict

Positive = Annotated[float, Field(gt=0)]
_MOST_PATCHES = 2**16  # of a clip, and values of a patch: a mistyped number must not take all memory


class ProjectionConfig(Strict):
    """Head between pooling and the contrastive loss (DeCLUTR appendix; SimCLR). Not exported."""

    kind: Literal["none", "linear", "mlp"] = "none"
    """none: the loss uses the pooled embedding. linear: two linear layers. mlp: with a ReLU between them."""
    size: int = Field(default=128, ge=1)
    """Width of the projected embedding and the hidden layer."""


class FrontendConfig(Strict):
    """Patches of images or sounds as input of the encoder's layers instead of word embeddings. Not exported."""

    pretrained: str | None = None
    """Name or folder of a ViT of transformers for patch, CLS and position embeddings; null: new ones from the run's
    seed. Images only."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch in pixels; frames and mel bands of a spectrogram's."""
    image_size: int = Field(default=224, ge=1)
    """Height and width of images' square crops in pixels."""
    positions: bool = True
    """Add a learned embedding for each place of a patch."""
    mean: float | tuple[float, float, float] | None = None
    """Mean to subtract from pixels in [0, 1] (one number, or three for red, green, blue) or log-mel values; null: 0.5
    for images, 0 for sounds."""
    std: Positive | tuple[Positive, Positive, Positive] | None = None
    """Standard deviation to divide by, one number or one a channel; null: 0.5 for images, 1 for sounds."""

    @model_validator(mode="after")
    def _fits(self) -> "FrontendConfig":
        if min(self.patch_size) < 1:
            raise ValueError(f"patch_size = {list(self.patch_size)}: both numbers must be at least 1")
        (high, wide), limit = self.patch_size, _MOST_PATCHES
        if high * wide > limit:
            raise ValueError(
                f"patch_size = {list(self.patch_size)}: has {high * wide:,} values; at most {limit:,} are possible"
            )
        if (patches := (self.image_size // high) * (self.image_size // wide)) > limit:
            raise ValueError(
                f"image_size = {self.image_size} makes {patches:,} patches of {list(self.patch_size)}; at most "
                f"{limit:,} are possible: make the patches larger or the image smaller"
            )
        return self


class EncoderConfig(Strict):
    """The encoder to train, and its embeddings of spans."""

    pretrained: str | None = None
    """Name or folder of a masked language model of transformers; either this or `from_config`."""
    from_config: dict[str, Any] | None = None
    """Config of transformers (with `model_type`) for new weights from the run's seed. Vocabulary size and special ids
    come from the shards' tokenizer."""
    trust_remote_code: bool = False
    """Run the code in a pretrained model's files. Only for models you trust."""
    new_mlm_head: bool = False
    """Draw an MLM head from the run's seed if the pretrained encoder has none."""
    pooling: Literal["mean", "cls", "max", "mean_without_cls"] = "mean"
    """Embedding of a span. mean: mean of all tokens, specials included, as released. max: their maximum. cls: the first
    token. mean_without_cls: mean of all but the first, as in SCL; sentence-transformers cannot load the export."""
    projection: ProjectionConfig = ProjectionConfig()
    prompt: str | None = Field(default=None, max_length=16_384)
    """Text before every span, which is read and pooled but not predicted, for an encoder that wants one, such as
    `passage:`. null: none; a pretrained encoder that declares prompts for queries or documents is refused then."""
    query_prompt: str | None = Field(default=None, max_length=16_384)
    """As `prompt`, before anchors that are queries (`spans.query_share`) and before premises of supervised SimCSE.
    null: `prompt`, there too."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: no padding, attention within spans only; encoders for which this is not proved equal use padded. padded:
    always pad."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Replaces every dropout probability of the model; null: keep the model's."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Probability of dropping attention weights; null: `dropout`, or the model's. Above 0, a CPU computes attention
    weights explicitly, which is slow and needs memory; a GPU does so in float32, in padded layouts, and without
    Triton."""

    num_trainable_layers: int | None = Field(default=None, ge=1)
    """Train only this many of the last layers and what follows them. null: train everything."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and recompute the rest: less memory, a third more time."""
    compile: bool | None = None
    """Compile layers and MLM loss with torch.compile, for training alone. null: on GPUs, unless parameters are sharded
    or no C compiler is installed."""

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
