"""Shortened lists of names and shortened texts for messages."""

from collections.abc import Sequence


def excerpt(names: Sequence[str], most: int = 3) -> str:
    """Joins the first `most` names with commas and counts the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shorten(text: str, most: int) -> str:
    """Cuts a text longer than `most` characters and marks the cut with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
