"""Windows in which anchors may lie, and the shortest document to keep. Lengths are in tokens without special ones."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import Strict

ShortDocuments = Literal["drop", "fewer_anchors", "shrink_spans"]
EMPTY = "empty"
TOO_SHORT = "too_short"


class Geometry(Strict):
    """Length and number of spans, for windows."""

    num_anchors: int = Field(default=2, ge=1)
    """Anchors a document must have room for."""
    max_tokens: int = Field(default=512, ge=2)
    """Longest span (l_max) and length of windows, in tokens."""
    min_tokens: int = Field(default=32, ge=1)
    """Shortest window with `short_documents: shrink_spans`, in tokens."""


def shortest_document(geometry: Geometry, short_documents: ShortDocuments = "drop") -> int:
    """Tokens of the shortest document to keep."""
    anchors = 1 if short_documents == "fewer_anchors" else geometry.num_anchors
    return 2 * anchors * (geometry.min_tokens if short_documents == "shrink_spans" else geometry.max_tokens)


def drop_reason(num_tokens: int, geometry: Geometry, short_documents: ShortDocuments = "drop") -> str | None:
    """The reason to drop a document of this many tokens; None if it is kept."""
    if num_tokens == 0:
        return EMPTY
    return TOO_SHORT if num_tokens < shortest_document(geometry, short_documents) else None


def limit_in_words(geometry: Geometry, short_documents: ShortDocuments) -> str:
    """The length of the shortest document to keep, with the settings that decide it."""
    anchors = "" if short_documents == "fewer_anchors" else f" * geometry.num_anchors ({geometry.num_anchors})"
    name = "min_tokens" if short_documents == "shrink_spans" else "max_tokens"
    return f"2{anchors} * geometry.{name} ({getattr(geometry, name)}) = {shortest_document(geometry, short_documents)}"


def window_tokens(num_tokens: int, geometry: Geometry, short_documents: ShortDocuments = "drop") -> int:
    """Length of a kept document's windows and of its longest span: max_tokens, or less with shrink_spans."""
    if short_documents == "shrink_spans":
        return min(geometry.max_tokens, num_tokens // (2 * geometry.num_anchors))
    return geometry.max_tokens


def document_windows(
    num_tokens: int, geometry: Geometry, short_documents: ShortDocuments = "drop"
) -> NDArray[np.int32]:
    """The `windows` column of a kept document: starts of the windows that may hold an anchor, ascending."""
    return window_starts(num_tokens, window_tokens(num_tokens, geometry, short_documents))


def window_starts(num_tokens: int, max_tokens: int) -> NDArray[np.int32]:
    """Starts k * max_tokens of the whole windows of a text, `(num_tokens // max_tokens,)`; the tail has no anchor."""
    return np.arange(num_tokens // max_tokens, dtype=np.int32) * np.int32(max_tokens)
