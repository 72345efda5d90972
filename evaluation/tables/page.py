"""Page of blocks with a bar below each number: one file without scripts and network requests."""

from collections.abc import Sequence

from declutr.evaluation.report.markup import Html, join, tag
from declutr.evaluation.report.page import document
from declutr.evaluation.report.svg import draw_bar
from declutr.evaluation.tables.blocks import Block, Cell, ModelRow
from declutr.evaluation.tables.markdown import shown
from declutr.evaluation.tables.remarks import Remarks


def page(blocks: Sequence[Block], told: Remarks) -> str:
    """Return the whole document. Equal blocks give equal text."""
    links = [tag("a", block.short, href=f"#{block.name}") for block in blocks]
    sections = [
        tag("section", tag("h2", block.title, id=f"{block.name}-head"), _table(block, told), id=block.name)
        for block in blocks
    ]
    notes = [join(tag("h2", title), tag("ul", *(tag("li", line) for line in lines))) for title, lines in told.parts()]
    body = tag(
        "body",
        tag(
            "header",
            tag("p", "Sentence encoders", class_="kind"),
            tag("h1", "SentEval"),
            tag(
                "p",
                "Higher is better, except alignment and uniformity. ",
                tag("span", class_="swatch kept"),
                "scored here ",
                tag("span", class_="swatch dropped"),
                "published, copied from the papers",
                class_="lead",
            ),
        ),
        tag("nav", *links, aria_label="Tables"),
        tag("main", *sections, tag("section", *notes, id="remarks")),
        tag("footer", "Made by ", tag("code", "declutr evaluate"), "."),
    )
    return document("SentEval: sentence encoders compared", body)


def _table(block: Block, told: Remarks) -> Html:
    head = tag(
        "tr", tag("th", "", scope="col"), *(tag("th", name, scope="col", class_="number") for name in block.columns)
    )
    rows = [
        tag("tr", tag("th", _name(row, told), scope="row"), *(_cell(cell, row, block.percent) for cell in row.cells))
        for row in block.rows
    ]
    inner = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=block.title)


def _name(row: ModelRow, told: Remarks) -> Html:
    label = tag("bdi", row.label, class_="label")
    return join(label, tag("small", f"published ({told.numbers[row.source]})")) if row.source else label


def _cell(cell: Cell, row: ModelRow, percent: bool) -> Html:
    bar = None
    if percent and cell.value is not None and not cell.signed:
        bar = draw_bar(max(cell.value, 0.0), 100.0, "dropped" if row.source else "kept")
    return tag("td", shown(cell, percent), *([bar] if bar else []), class_="number")
