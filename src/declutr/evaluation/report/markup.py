"""HTML builder that escapes every text that is not already `Html`.

Texts of a corpus are hostile. They hold script tags, control characters, and overrides of the writing direction, which
reorder the page around them. The page shows the code points of such characters, so that no browser obeys them.
"""

import base64
import hashlib
import html

from declutr.common.console.terminal import visible as visible

_VOID = frozenset({"meta", "br", "rect", "line", "img"})


class Html(str):
    """Markup. Any other `str` is text that is still to be escaped."""

    __slots__ = ()


def markup(value: object) -> Html:
    """Converts a value to markup: integers get thousands separators, None becomes a dash, all but `Html` is escaped."""
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("–")
    if isinstance(value, int):
        return Html(f"{value:,}")
    return Html(html.escape(visible(str(value)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element. Attributes that are None are left out; `class_` is class, other underscores are hyphens."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{markup(value if isinstance(value, Html) else str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{told}/>")
    return Html(f"<{name}{told}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Joins values as markup."""
    return Html("".join(markup(child) for child in children))


def table(caption: str, heads: list[str], rows: list[list[object]], **attributes: object) -> Html:
    """Table whose first column names the row. All other columns are numbers, aligned right.

    On a narrow screen the table scrolls, not the page.
    """
    first, *others = heads
    head = tag("tr", tag("th", first, scope="col"), *(tag("th", name, scope="col", class_="number") for name in others))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(tag("td", value, class_="number") for value in row[1:]))
        for row in rows
    ]
    inner = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), **attributes)
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def details(summary: str, *children: object, **attributes: object) -> Html:
    """Section that is collapsed until the reader opens it."""
    return tag("details", tag("summary", summary), *children, **attributes)


def share(part: float, whole: float) -> str:
    """Percentage with one decimal; a dash if the whole is 0."""
    return f"{part / whole:.1%}" if whole else "–"


def in_mib(num_bytes: float) -> str:
    """Bytes in MiB, or GiB from 10 GiB on."""
    mib = num_bytes / 2**20
    return f"{mib / 1024:,.1f} GiB" if mib >= 10_240 else f"{mib:,.1f} MiB" if mib >= 10 else f"{mib:,.2f} MiB"


def policy_hash(text: str) -> str:
    """Source expression that permits exactly this style or script in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def place(source: str, offset: int) -> Html:
    """A place in the form that `declutr inspect --document` accepts."""
    return tag("code", tag("bdi", f"{source}:{offset}"))
