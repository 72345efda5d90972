"""Which documents are kept. What is not kept has a reason, and reasons are counted."""

from pipeline.shards.windows import Geometry, ShortDocuments, shortest_document

EMPTY = "empty"
TOO_SHORT = "too_short"


def drop_reason(num_tokens: int, geometry: Geometry, short_documents: ShortDocuments = "drop") -> str | None:
    """Why a document of this many tokens is dropped, or None when it is kept."""
    if num_tokens == 0:
        return EMPTY
    return TOO_SHORT if num_tokens < shortest_document(geometry, short_documents) else None


def limit_in_words(geometry: Geometry, short_documents: ShortDocuments) -> str:
    """The shortest document that is kept, with the settings it follows from."""
    anchors = "" if short_documents == "fewer_anchors" else f" * geometry.num_anchors ({geometry.num_anchors})"
    name = "min_tokens" if short_documents == "shrink_spans" else "max_tokens"
    tokens = shortest_document(geometry, short_documents)
    return f"2{anchors} * geometry.{name} ({getattr(geometry, name)}) = {tokens}"
