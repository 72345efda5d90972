"""Settings of `declutr embed`: encoder, inputs, output."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from declutr.common.config import Strict
from declutr.encoders.protocol import EncoderChoice
from declutr.pipeline.readers.corpus import TextField

Format = Literal["auto", "jsonl", "text", "text_file", "parquet", "arrow", "csv", "tsv"]


VectorType = Literal["float32", "int8"]
"""Type of the vectors of an index."""


class EmbedError(ValueError):
    """Texts that cannot be read, settings that contradict each other, or an output that cannot be written."""


class Shape(Strict):
    """Postprocessing of an embedding, in this order: truncate, normalise, round."""

    dimensions: int | None = Field(default=None, ge=1)
    """Keep only the first numbers, this many. They have length 1 again only with `normalise`."""
    normalise: bool = False
    """Divide by the Euclidean length; a null vector stays null."""
    dtype: Literal["float32", "float16", "int8"] = "float32"
    """int8: scaled so that the number of largest magnitude is 127, then rounded; only the direction is kept."""


class EmbedConfig(Strict):
    """Settings of one job."""

    choice: EncoderChoice
    inputs: list[str] = Field(min_length=1)
    """Files, folders and globs, as `prepare` takes them."""
    output: Path
    """.npy: `(texts, size)`. .parquet: columns row, id if requested, embedding."""
    text_field: TextField = "text"
    """Key or column of the text, or several, as `prepare` takes them."""
    id_field: str | None = None
    """Key or column of a text that identifies each row, written next to its embedding."""
    format: Format = "auto"
    """Format of the inputs; auto detects it from name and content."""
    shape: Shape = Shape()
    skip_bad: bool = False
    """Skip and count records that cannot be read; otherwise the first such record stops the job."""
    unit_mib: float | None = Field(default=None, gt=0)
    """Input per unit of work in MiB; if not set, 1, and more for inputs above 4,096 units."""
    workers: int | None = Field(default=None, ge=0)
    """Ray workers; 0 uses this process. If not set: this process for small inputs, else all GPUs, else all CPUs."""
