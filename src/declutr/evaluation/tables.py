"""Tables of results as Markdown and JSON, with remarks: missing scores, warnings, marks, doubts, sources."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from declutr.common.storage import write_json, write_text
from declutr.evaluation.blocks import Block, Cell, ModelRow, PublishedModel, compare, literature
from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.tasks import MARKS, find


@dataclass(frozen=True)
class Remarks:
    """Remarks on tables."""

    parts: tuple[tuple[str, tuple[str, ...]], ...]
    """Title and lines of each kind of remarks that has lines."""
    numbers: Mapping[str, int]
    """Number of each paper."""


def remarks(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel]) -> Remarks:
    """Collect the remarks."""
    marks, warnings, missing = list[str](), list[str](), list[str]()
    for scored in evaluated:
        encoder, reports = scored.encoder, scored.reports.values()
        results = [item for report in reports for item in report.results.items()]
        own = _grouped((MARKS[score.standing], name) for name, score in results if not score.comparable)
        marks += [f"{encoder}: {names}: {why}" for why, names in own.items()]
        warnings += [f"{encoder}: {warning}" for warning in scored.warnings]
        of_tasks = _grouped((warning, name) for name, score in results for warning in score.warnings)
        warnings += [f"{encoder}, {names}: {warning}" for warning, names in of_tasks.items()]
        gone = _grouped((reason, name) for report in reports for name, reason in report.missing.items())
        missing += [f"{encoder}: {names}: {reason}" for reason, names in gone.items()]
    doubts = dict[str, list[str]]()
    for model in (model for model in published if model.doubt):
        names = ", ".join(find(name).label for name in model.doubted)
        doubts.setdefault(f"{model.source}, {names}: {model.doubt}", []).append(model.model)
    marks += [f"{', '.join(models)} in {doubt}" for doubt, models in doubts.items()]
    scored_names = {scored.encoder for scored in evaluated}
    differences = [
        f"{scored.encoder}: to {scored.pretrained}"
        + ("" if scored.pretrained in scored_names else ", which was not scored in this call")
        for scored in evaluated
        if scored.pretrained and scored.pretrained != scored.encoder
    ]
    differences += [f"{model.model}, published: to {model.pretrained}" for model in published if model.pretrained]
    numbers = {source: number for number, source in enumerate(dict.fromkeys(model.source for model in published), 1)}
    ways = {"mean": "mean of subsets", "wmean": "weighted mean", "all": "all pairs"}
    sources = dict.fromkeys(
        f"{numbers[model.source]}: {model.source}; "
        + (f"STS12-16 by {ways[model.sts]}" if model.split == "test" else "validation pairs of STS-B")
        + "; copied from the paper, not computed here"
        for model in published
    )
    kinds = (
        ("Difference Δ", differences),
        ("Marked *", marks),
        ("Warnings", warnings),
        ("Not scored, and in no average", missing),
        ("Published numbers", sources),
    )
    return Remarks(tuple((title, tuple(lines)) for title, lines in kinds if lines), numbers)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Labels of tasks by remark, each once, in order of appearance."""
    labels: dict[str, dict[str, None]] = {}
    for remark, task in pairs:
        labels.setdefault(remark, {})[find(task).label] = None
    return {remark: ", ".join(names) for remark, names in labels.items()}


def markdown(blocks: Sequence[Block], notes: Remarks) -> str:
    """Format blocks as headings and tables, followed by the remarks."""
    return "\n".join([*_lines(blocks, notes), ""])


def _lines(blocks: Sequence[Block], notes: Remarks) -> Iterator[str]:
    yield "# Sentence encoders on SentEval"
    for block in blocks:
        yield from ("", f"## {block.title}", "")
        yield f"| {' | '.join(['', *block.columns])} |"
        yield f"| {' | '.join(['---', *('---:' for _ in block.columns)])} |"
        for row in block.rows:
            label = _plain(row.label)
            label = f"*{label}*, published ({notes.numbers[row.source]})" if row.source else f"**{label}**"
            yield f"| {' | '.join([label, *(shown(cell, block.percent) for cell in row.cells)])} |"
    for title, lines in notes.parts:
        yield from ("", f"## {title}", "")
        yield from (f"- {_plain(line)}" for line in lines)


def shown(cell: Cell, percent: bool = True) -> str:
    """Format a number; a dash if there is none."""
    if cell.value is None:
        return "–"
    return f"{cell.value:{'+' if cell.signed else ''}.{2 if percent else 3}f}{'*' if cell.marked else ''}"


def _plain(text: str) -> str:
    """Escape Markdown, because names of encoders and files may contain anything."""
    kept = "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)
    return " ".join(kept.split())


def write_tables(evaluated: Sequence[Evaluated], folder: Path) -> str:
    """Write `scores.md` and `scores.json`; return the Markdown of the encoders alone, for a terminal."""
    published = literature()
    blocks = tables(evaluated, published)
    write_text(folder / "scores.md", markdown(blocks, remarks(evaluated, published)))
    names = ("encoder", "fingerprint", "size", "warnings", "seconds", "pretrained", "geometry")
    encoders = [
        {name: getattr(scored, name) for name in names}
        | {"protocols": {protocol: report.to_json() for protocol, report in scored.reports.items()}}
        for scored in evaluated
    ]
    models = [model.model_dump(mode="json") for model in published]
    facts = {"encoders": encoders, "published": models, "tables": [asdict(block) for block in blocks]}
    write_json(folder / "scores.json", facts)
    return markdown(tables(evaluated, ()), remarks(evaluated, ()))


_PREFERRED = ("mean of the two", "mean, without SNLI", "all 28", "downstream", "without SNLI", "probing")
"""Averages in order of preference for the difference; the first is the papers' Avg."""


def tables(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel]) -> tuple[Block, ...]:
    """Build the tables with their columns of differences to the pretrained row of the same source."""
    starts = {(scored.encoder, ""): scored.pretrained for scored in evaluated}
    starts |= {(model.model, model.source): model.pretrained for model in published}
    return tuple(_with_differences(block, starts) for block in compare(evaluated, published))


def _with_differences(block: Block, starts: Mapping[tuple[str, str], str]) -> Block:
    """Add the column if a row and its pretrained row both have the number; the column's name includes the number's.

    The difference is that of the block's mean, or of the mean over all columns if the block has none.
    """
    if not block.percent:
        return block
    preferred = _PREFERRED if block.name.startswith("averages") else ("mean",)
    of = next((name for name in preferred if name in block.columns), "")
    rows = {(row.label, row.source): row for row in block.rows}
    cells = []
    for row in block.rows:
        start = rows.get((starts.get((row.label, row.source), ""), row.source))
        after, before = _number(block, row, of), _number(block, start, of) if start and start is not row else Cell(None)
        has_both = after.value is not None and before.value is not None
        value = (after.value or 0.0) - (before.value or 0.0) if has_both else None
        cells.append(Cell(value, has_both and (after.marked or before.marked), signed=True))
    if all(cell.value is None for cell in cells):
        return block
    added = tuple(replace(row, cells=(*row.cells, cell)) for row, cell in zip(block.rows, cells, strict=True))
    return replace(block, columns=(*block.columns, f"Δ {of or 'mean'}"), rows=added)


def _number(block: Block, row: ModelRow, of: str) -> Cell:
    if of:
        return row.cells[block.columns.index(of)]
    values = [cell.value for cell in row.cells if cell.value is not None]
    whole = len(values) == len(row.cells)  # a mean over other columns would be compared
    return Cell(sum(values) / len(values) if whole else None, any(cell.marked for cell in row.cells))
