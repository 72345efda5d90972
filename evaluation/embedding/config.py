"""What is embedded, how, and where to."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from common.config import Strict
from evaluation.encoders.modules import Pooling
from evaluation.encoders.transformer import LongTexts

Format = Literal["auto", "jsonl", "text", "text_file", "parquet", "arrow", "csv", "tsv"]


class EmbedError(ValueError):
    """Texts that cannot be read, settings that do not go together, or an output that cannot be written."""


class Choice(Strict):
    """Which encoder, and how it treats long texts."""

    model: str
    """As `load_encoder` takes it."""
    pooling: Pooling | None = None
    """Overrides what the encoder says."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Of one input, specials included; the encoder's own limit when not set."""
    long_texts: LongTexts = "cut"
    """Longer texts are cut, or read in windows whose embeddings are averaged by their tokens."""
    trust_remote_code: bool = False
    """Run code that a model brings along. Only for models you trust. In a note or an index this is a record: reading it
    back grants nothing."""


class Shape(Strict):
    """What becomes of an embedding before it is written, in this order: truncated, normalised, rounded."""

    dimensions: int | None = Field(default=None, ge=1)
    """Keep the first so many numbers. They are of length 1 again only with `normalise`."""
    normalise: bool = False
    """Divide by the Euclidean length; a null vector stays."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the numbers in the file."""


class EmbedConfig(Strict):
    """One job."""

    choice: Choice
    inputs: list[str] = Field(min_length=1)
    """Files, folders and globs, as `prepare` takes them."""
    output: Path
    """.npy: `(texts, size)`. .parquet: columns row, the id where asked for, embedding."""
    text_field: str = "text"
    """Key or column of the text."""
    id_field: str | None = None
    """Key or column of a text that identifies each row, written beside its embedding."""
    format: Format = "auto"
    """Of the inputs; auto goes by name and content."""
    shape: Shape = Shape()
    skip_bad: bool = False
    """Leave out and count what cannot be read; otherwise the first such record stops the work."""
    unit_mib: float | None = Field(default=None, gt=0)
    """Input of one unit of work; 1 MiB, and more from 4,096 units on, when not set."""
    workers: int | None = Field(default=None, ge=0)
    """Ray workers; 0: this process alone. Not set: this process for small inputs, else all GPUs, else all CPUs."""
