"""Keys and columns of a text: the missing ones, and the text of several joined by newlines."""

from collections.abc import Iterable, Sequence

from declutr.common.excerpt import shorten
from declutr.common.suggestions import suggest

NO_TEXT = "no_text_field"
TEXT_SETTING = "corpus.text_field"
_SHOWN_CHARACTERS = 200

Names = tuple[str, ...]
"""Keys or columns that hold a text, in the order in which their values are joined."""


def names_of(text_field: str | Sequence[str]) -> Names:
    """The keys or columns of a setting that takes one or several."""
    return (text_field,) if isinstance(text_field, str) else tuple(text_field)


def shown_names(names: Names) -> str:
    """The names as the setting takes them."""
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def missing(names: Names, found: Sequence[str], what: str = "column") -> str | None:
    """A message on the first of these names that was not found, with the nearest of those that were; else None."""
    for name in names:
        if name not in found:
            hint = separated(found) or suggest(name, found)
            return f"no {what} {name!r}; found {shorten(', '.join(found), _SHOWN_CHARACTERS)}{hint}"
    return None


def separated(header: Sequence[str]) -> str:
    """A remark on a header that was not cut, because its columns are not separated by what the format expects."""
    if len(header) != 1:
        return ""
    if "\t" in header[0]:
        return "; its columns are separated by tabs: set corpus.format to tsv"
    return "; its columns are separated by ;, and CSV needs commas" if ";" in header[0] else ""


def joined(values: Iterable[bytes]) -> bytes:
    """The text of several values, empty ones left out."""
    return b"\n".join(value for value in values if value)
