"""Which documents are kept. What is not kept has a reason, and reasons are counted."""

from pipeline.windows import Geometry

EMPTY = "empty"
TOO_SHORT = "too_short"


def drop_reason(num_tokens: int, geometry: Geometry) -> str | None:
    """Why a document of this many tokens is dropped, or None when it is kept."""
    if num_tokens == 0:
        return EMPTY
    return TOO_SHORT if num_tokens < geometry.min_document_tokens else None
