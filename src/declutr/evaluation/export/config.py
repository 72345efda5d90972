"""Settings of `declutr export`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from declutr.common.config import Strict
from declutr.pipeline.readers.corpus import TextField

Target = Literal["onnx", "onnx-int8", "static"]


class ExportConfig(Strict):
    """Settings of one export."""

    model: str
    """Name as `load_encoder` takes it."""
    to: Target
    """Form to write: a graph in float32, a graph in 8-bit integers, or a table of token vectors."""
    output: Path
    """Folder to create."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of one input of a graph; the encoder's own limit if not set."""
    corpus: list[str] = Field(default_factory=list)
    """Files, folders and globs of your texts. A table has their words; the ranges of integers cover them; without
    `stsb` and `pairs`, encoder and export are compared on them, integers on every second."""
    text_field: TextField = "text"
    """Key or column of the text in `corpus`, or several, as `prepare` takes them."""
    vocabulary_size: int = Field(default=30_000, ge=100, le=1_000_000)
    """Most tokens of a table."""
    dimensions: int = Field(default=256, ge=2)
    """Most numbers of an embedding of a table."""
    stsb: Path | None = None
    """Folder with STS-B's sts-test.csv, on which both encoders are scored."""
    pairs: Path | None = None
    """Your queries with the texts that they should find, on which both encoders are scored."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you trust."""
