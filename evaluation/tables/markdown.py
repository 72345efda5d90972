"""Blocks as Markdown tables."""

from collections.abc import Iterator, Sequence

from declutr.evaluation.tables.blocks import Block, Cell, ModelRow
from declutr.evaluation.tables.remarks import Remarks


def markdown(blocks: Sequence[Block], told: Remarks) -> str:
    """Format blocks as headings and tables, followed by the remarks."""
    return "\n".join([*_lines(blocks, told), ""])


def _lines(blocks: Sequence[Block], told: Remarks) -> Iterator[str]:
    yield "# Sentence encoders on SentEval"
    for block in blocks:
        yield ""
        yield f"## {block.title}"
        yield ""
        yield _row(["", *block.columns])
        yield _row(["---", *("---:" for _ in block.columns)])
        yield from (_row([_name(row, told), *(shown(cell, block.percent) for cell in row.cells)]) for row in block.rows)
    for title, lines in told.parts():
        yield ""
        yield f"## {title}"
        yield ""
        yield from (f"- {_plain(line)}" for line in lines)


def shown(cell: Cell, percent: bool = True) -> str:
    """Format a number; a dash if there is none."""
    if cell.value is None:
        return "–"
    return f"{cell.value:{'+' if cell.signed else ''}.{2 if percent else 3}f}{'*' if cell.marked else ''}"


def _name(row: ModelRow, told: Remarks) -> str:
    label = _plain(row.label)
    return f"*{label}*, published ({told.numbers[row.source]})" if row.source else f"**{label}**"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escape Markdown, because names of encoders and files may contain anything."""
    kept = "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)
    return " ".join(kept.split())
