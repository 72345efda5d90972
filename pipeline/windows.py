"""Where anchors may lie: plain arithmetic on lengths. All lengths are in tokens, without special tokens."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from common.config import Strict


class Geometry(Strict):
    """How long and how many spans are: what decides which documents are long enough, and where their windows start."""

    num_anchors: int = Field(default=2, ge=1)
    """Anchors a document must have room for."""
    max_tokens: int = Field(default=512, ge=2)
    """Longest span, the paper's l_max, in tokens. Windows are this long."""

    @property
    def min_document_tokens(self) -> int:
        """Shortest document that is kept: 2 * num_anchors * max_tokens, so that anchors stay max_tokens apart."""
        return 2 * self.num_anchors * self.max_tokens


def window_starts(num_tokens: int, max_tokens: int) -> NDArray[np.int32]:
    """Starts k * max_tokens of the whole windows in a document; the tail shorter than a window can hold no anchor.

    Args:
        num_tokens: length of the document.
        max_tokens: length of a window.

    Returns:
        `(num_tokens // max_tokens,)`, ascending.

    Raises:
        ValueError: a negative length, or windows of no tokens.
    """
    if num_tokens < 0 or max_tokens < 1:
        raise ValueError(f"num_tokens = {num_tokens} must be >= 0 and max_tokens = {max_tokens} must be >= 1")
    return np.arange(num_tokens // max_tokens, dtype=np.int32) * np.int32(max_tokens)
