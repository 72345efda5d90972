"""Interface of every sentence encoder."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from declutr.common.storage import hash_json


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
        """SHA-256 of everything that decides the embeddings but the precision of their computation."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return embeddings `(len(texts), size)` in the order of the texts."""


def unit_rows(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows `(n, size)` scaled to length 1, in their own precision; a null row stays null."""
    unit: NDArray[Any] = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit


def vectors_fingerprint(encoder: SentenceEncoder) -> str:
    """SHA-256 of everything that decides the embeddings, the precision included; equal ones mean equal vectors."""
    if getattr(encoder, "precision", "fp32") == "fp32":
        return encoder.fingerprint
    return hash_json([encoder.fingerprint, "bf16"])
