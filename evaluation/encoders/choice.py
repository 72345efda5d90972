"""Choice of an encoder, as jobs and indexes record it."""

from pydantic import Field

from common.config import Strict
from evaluation.encoders.loading import load_encoder
from evaluation.encoders.modules import Pooling
from evaluation.encoders.protocol import SentenceEncoder
from evaluation.encoders.transformer import LongTexts


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
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Only for models you trust. In a note or an index this is a record:
    reading it back grants nothing."""


def encoder_of(choice: EncoderChoice, *, trust_remote_code: bool) -> SentenceEncoder:
    """Load the encoder of a job or an index.

    Args:
        choice: encoder and its treatment of long texts. It may come from somebody else's file, so the trust recorded in
            it is ignored.
        trust_remote_code: whether the current command trusts the model.

    Raises:
        EncoderError: the encoder cannot be loaded.
    """
    return load_encoder(
        choice.model,
        choice.pooling,
        max_tokens=choice.max_tokens,
        long_texts=choice.long_texts,
        trust_remote_code=trust_remote_code,
    )
