"""Interface of every sentence encoder."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EncoderError(ValueError):
    """A folder, file or name that cannot be loaded as an encoder."""


class SentenceEncoder(Protocol):
    """Converter of texts to embeddings."""

    @property
    def name(self) -> str:
        """Name by which it was loaded."""

    @property
    def size(self) -> int:
        """Numbers in an embedding."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the embeddings; equal fingerprints mean equal vectors."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return embeddings `(len(texts), size)` in the order of the texts."""
