"""What every sentence encoder offers, whatever it is made of."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EncoderError(ValueError):
    """A folder, file or name that is no encoder this project can load."""


class SentenceEncoder(Protocol):
    """Texts to embeddings."""

    @property
    def name(self) -> str:
        """What it was asked for by."""

    @property
    def size(self) -> int:
        """Numbers in an embedding."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides the embeddings: two encoders with the same one give the same vectors."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)` in the order of the texts."""
