"""Difference column: the distance of each encoder from the pretrained one it was trained from."""

from collections.abc import Mapping
from dataclasses import replace

from evaluation.tables.blocks import Block, Cell, ModelRow

Starts = Mapping[tuple[str, str], str]
"""Label of the pretrained row, by label and source of a row; both have the same source."""
_PREFERRED = ("mean of the two", "mean, without SNLI", "all 28", "downstream", "without SNLI", "probing")
"""Averages in order of preference for the difference; the first is the papers' Avg."""


def with_differences(block: Block, starts: Starts) -> Block:
    """Add the column if a row and its pretrained row both have the number; the column's name includes the number's.

    The difference is that of the block's mean, or of the mean over all columns if the block has none.
    """
    if not block.percent or not block.columns:
        return block
    wanted = ("mean",) if block.name != "averages" else _PREFERRED
    of = next((name for name in wanted if name in block.columns), "")
    rows = {(row.label, row.source): row for row in block.rows}
    cells = []
    for row in block.rows:
        start = rows.get((starts.get((row.label, row.source), ""), row.source))
        mine, theirs = _number(block, row, of), _number(block, start, of) if start and start is not row else Cell(None)
        known = mine.value is not None and theirs.value is not None
        value = (mine.value or 0.0) - (theirs.value or 0.0) if known else None
        cells.append(Cell(value, known and (mine.marked or theirs.marked), signed=True))
    if all(cell.value is None for cell in cells):
        return block
    added = tuple(replace(row, cells=(*row.cells, cell)) for row, cell in zip(block.rows, cells, strict=True))
    return replace(block, columns=(*block.columns, f"Δ {of or 'mean'}"), rows=added)


def _number(block: Block, row: ModelRow, of: str) -> Cell:
    if of:
        return row.cells[block.columns.index(of)]
    values = [cell.value for cell in row.cells if cell.value is not None]
    whole = len(values) == len(row.cells)
    return Cell(sum(values) / len(values) if whole else None, any(cell.marked for cell in row.cells))
