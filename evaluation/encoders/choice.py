"""Settings of an encoder that embeds texts, readable without torch."""

from typing import Literal

from pydantic import Field

from declutr.common.config import Strict

Pooling = Literal["mean", "cls", "max", "mean_without_cls"]
LongTexts = Literal["cut", "windows"]
AnyPrecision = Literal["auto", "fp32", "bf16"]


class EncoderChoice(Strict):
    """Encoder and its treatment of long texts."""

    model: str
    """Name as `load_encoder` takes it."""
    pooling: Pooling | None = None
    """Pooling that overrides the encoder's own."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one input, including special tokens; the encoder's own limit if not set."""
    long_texts: LongTexts = "cut"
    """Treatment of longer texts: cut them, or read them in windows and average by tokens."""
    precision: AnyPrecision = "auto"
    """Precision of the matrix products. auto: bf16 on a GPU that has it (cosine to fp32 at least 0.999), else fp32."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Only for models you trust. In a note or an index this is a record:
    reading it back grants nothing."""
