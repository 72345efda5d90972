"""Names in a message: all of them where they are few, else the first ones and the number of the others."""

from collections.abc import Sequence


def excerpt(names: Sequence[str], most: int = 3) -> str:
    """At most so many of the names, separated by commas, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
