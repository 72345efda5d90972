"""Settings of the encoder, readable without torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict

Positive = Annotated[float, Field(gt=0)]
_MOST_PATCHES = 2**16  # of a clip, and values of a patch: a mistyped number must not take all memory


class ProjectionConfig(Strict):
    """Head between pooling and the contrastive loss. Not exported."""

    kind: Literal["none", "linear", "mlp"] = "none"
    """none: no head. linear: two linear layers. mlp: with a ReLU between."""
    size: int = Field(default=128, ge=1)
    """Width of the projected embedding and the hidden layer."""


class FrontendConfig(Strict):
    """Patches of images or sounds instead of word embeddings. Not exported."""

    pretrained: str | None = None
    """Name or folder of a ViT, for its embeddings; null: new ones. Images only."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch: pixels, or frames and mel bands."""
    image_size: int = Field(default=224, ge=1)
    """Height and width of images' square crops in pixels."""
    positions: bool = True
    """Add a learned embedding for each place of a patch."""
    mean: float | tuple[float, float, float] | None = None
    """Mean to subtract, one number or one a channel; null: 0.5 for images, 0 for sounds."""
    std: Positive | tuple[Positive, Positive, Positive] | None = None
    """Standard deviation, one number or one a channel; null: 0.5 for images, 1 for sounds."""

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
    """Name or folder of a masked language model; this or `from_config`."""
    from_config: dict[str, Any] | None = None
    """Config of transformers (with `model_type`) for new weights."""
    trust_remote_code: bool = False
    """Run the code of a pretrained model. Only for models you trust."""
    new_mlm_head: bool = False
    """Draw an MLM head if the encoder has none."""
    pooling: Literal["mean", "cls", "max", "mean_without_cls"] = "mean"
    """Embedding of a span. mean: mean of all tokens. max: their maximum. cls: the first token. mean_without_cls: mean
    of the others; sentence-transformers cannot load the export."""
    projection: ProjectionConfig = ProjectionConfig()
    prompt: str | None = Field(default=None, max_length=16_384)
    """Text before every span, such as `passage:`, not predicted. null: none; refused if the encoder declares
    prompts."""
    query_prompt: str | None = Field(default=None, max_length=16_384)
    """As `prompt`, before queries and premises of supervised SimCSE. null: `prompt`."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: no padding, if a test finds it equal. padded: always pad."""
    dropout: float | None = Field(default=None, ge=0, lt=1)
    """Every dropout probability of the model; null: the model's."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of attention weights; null: `dropout`, or the model's. Slow on CPUs, and on GPUs in float32, padded or
    without Triton."""

    num_trainable_layers: int | None = Field(default=None, ge=1)
    """Train only this many last layers and what follows; null: all."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward: less memory, a third more time."""
    compile: bool | None = None
    """Compile layers and MLM loss. null: on GPUs, unless sharded or without a C compiler."""

    @model_validator(mode="after")
    def _one_source(self) -> "EncoderConfig":
        if (self.pretrained is None) == (self.from_config is None):
            raise ValueError(
                "give exactly one of `pretrained` (name or folder) and `from_config`; encoder.from_config=null drops it"
            )
        if self.from_config is not None and "model_type" not in self.from_config:
            raise ValueError("from_config needs `model_type`, for example roberta, bert or modernbert")
        if self.from_config is not None and self.new_mlm_head:
            raise ValueError("new_mlm_head = True needs `pretrained`; with `from_config`, every weight is new")
        return self
