"""Shortened lists of names and shortened texts for messages."""

from collections.abc import Sequence


def excerpt(names: Sequence[str], most: int = 3) -> str:
    """Joins the first `most` names with commas and counts the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
