"""Tables of results as Markdown and JSON, with remarks: missing scores, warnings, marks, doubts, sources."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from declutr.common.storage import write_json, write_text
from declutr.evaluation.senteval.data.taskdata import MARKS
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.runner.harness import Evaluated
from declutr.evaluation.tables.blocks import Block, Cell, ModelRow, compare
from declutr.evaluation.tables.literature import PublishedModel, literature


@dataclass(frozen=True)
class Remarks:
    """Remark lines by kind, and the number of each paper; a kind without lines is not shown."""

    missing: tuple[str, ...]
    marks: tuple[str, ...]
    warnings: tuple[str, ...]
    sources: tuple[str, ...]
    numbers: Mapping[str, int]
    differences: tuple[str, ...]

    def parts(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Titles and lines of the kinds that have lines."""
        kinds = (
            ("Difference Δ", self.differences),
            ("Marked *", self.marks),
            ("Warnings", self.warnings),
            ("Not scored, and in no average", self.missing),
            ("Published numbers", self.sources),
        )
        return tuple((title, lines) for title, lines in kinds if lines)


def remarks(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel]) -> Remarks:
    """Collect the remarks."""
    marks, warnings, missing = [], [], []
    for scored in evaluated:
        encoder, reports = scored.encoder, list(scored.reports.values())
        results = [item for report in reports for item in report.results.items()]
        own = _grouped((MARKS[score.standing], name) for name, score in results if not score.comparable)
        marks += [f"{encoder}: {_labels(names)}: {why}" for why, names in own.items()]
        warnings += [f"{encoder}: {warning}" for warning in scored.warnings]
        of_tasks = _grouped((warning, name) for name, score in results for warning in score.warnings)
        warnings += [f"{encoder}, {_labels(names)}: {warning}" for warning, names in of_tasks.items()]
        gone = _grouped((reason, name) for report in reports for name, reason in report.missing.items())
        missing += [f"{encoder}: {_labels(names)}: {reason}" for reason, names in gone.items()]
    doubts = _grouped(
        (f"{model.source}, {_labels(model.doubted)}: {model.doubt}", model.model) for model in published if model.doubt
    )
    marks += [f"{', '.join(names)} in {doubt}" for doubt, names in doubts.items()]
    numbers = {
        source: number for number, source in enumerate(dict.fromkeys(model.source for model in published), start=1)
    }
    names = {scored.encoder for scored in evaluated}
    differences = [
        f"{scored.encoder}: to {scored.pretrained}"
        + ("" if scored.pretrained in names else ", which was not scored in this call")
        for scored in evaluated
        if scored.pretrained and scored.pretrained != scored.encoder
    ]
    differences += [f"{model.model}, published: to {model.pretrained}" for model in published if model.pretrained]
    return Remarks(
        tuple(missing), tuple(marks), tuple(warnings), _sources(published, numbers), numbers, tuple(differences)
    )


def _sources(published: Sequence[PublishedModel], numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Papers with their numbers and their aggregation of STS."""
    ways = {"mean": "mean of subsets", "wmean": "weighted mean", "all": "all pairs"}
    papers = dict.fromkeys(
        (model.source, f"STS12-16 by {ways[model.sts]}" if model.split == "test" else "validation pairs of STS-B")
        for model in published
    )
    return tuple(
        f"{numbers[source]}: {source}; {way}; copied from the paper, not computed here" for source, way in papers
    )


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, None]]:
    """Names by remark, each once, in order of appearance."""
    names_by_remark: dict[str, dict[str, None]] = {}
    for remark, name in pairs:
        names_by_remark.setdefault(remark, {})[name] = None
    return names_by_remark


def _labels(names: Iterable[str]) -> str:
    return ", ".join(find(name).label for name in names)


def markdown(blocks: Sequence[Block], notes: Remarks) -> str:
    """Format blocks as headings and tables, followed by the remarks."""
    return "\n".join([*_lines(blocks, notes), ""])


def _lines(blocks: Sequence[Block], notes: Remarks) -> Iterator[str]:
    yield "# Sentence encoders on SentEval"
    for block in blocks:
        yield ""
        yield f"## {block.title}"
        yield ""
        yield _row(["", *block.columns])
        yield _row(["---", *("---:" for _ in block.columns)])
        yield from (
            _row([_labelled(row, notes), *(shown(cell, block.percent) for cell in row.cells)]) for row in block.rows
        )
    for title, lines in notes.parts():
        yield ""
        yield f"## {title}"
        yield ""
        yield from (f"- {_plain(line)}" for line in lines)


def shown(cell: Cell, percent: bool = True) -> str:
    """Format a number; a dash if there is none."""
    if cell.value is None:
        return "–"
    return f"{cell.value:{'+' if cell.signed else ''}.{2 if percent else 3}f}{'*' if cell.marked else ''}"


def _labelled(row: ModelRow, notes: Remarks) -> str:
    label = _plain(row.label)
    return f"*{label}*, published ({notes.numbers[row.source]})" if row.source else f"**{label}**"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """Escape Markdown, because names of encoders and files may contain anything."""
    kept = "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)
    return " ".join(kept.split())


Starts = Mapping[tuple[str, str], str]
"""Label of the pretrained row, by label and source of a row; both have the same source."""
_PREFERRED = ("mean of the two", "mean, without SNLI", "all 28", "downstream", "without SNLI", "probing")
"""Averages in order of preference for the difference; the first is the papers' Avg."""


def write_tables(evaluated: Sequence[Evaluated], folder: Path) -> str:
    """Write `scores.md` and `scores.json`; return the Markdown of the encoders alone, for a terminal."""
    published = literature()
    blocks = tables(evaluated, published)
    write_text(folder / "scores.md", markdown(blocks, remarks(evaluated, published)))
    encoders = [
        {
            "encoder": scored.encoder,
            "fingerprint": scored.fingerprint,
            "size": scored.size,
            "warnings": list(scored.warnings),
            "seconds": scored.seconds,
            "pretrained": scored.pretrained,
            "geometry": dict(scored.geometry),
            "protocols": {protocol: report.to_json() for protocol, report in scored.reports.items()},
        }
        for scored in evaluated
    ]
    write_json(
        folder / "scores.json",
        {
            "encoders": encoders,
            "published": [model.model_dump(mode="json") for model in published],
            "tables": [asdict(block) for block in blocks],
        },
    )
    return markdown(tables(evaluated, ()), remarks(evaluated, ()))


def tables(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel]) -> tuple[Block, ...]:
    """Build the tables with their difference columns."""
    starts = {(scored.encoder, ""): scored.pretrained for scored in evaluated}
    starts |= {(model.model, model.source): model.pretrained for model in published}
    return tuple(_with_differences(block, starts) for block in compare(evaluated, published))


def _with_differences(block: Block, starts: Starts) -> Block:
    """Add the column if a row and its pretrained row both have the number; the column's name includes the number's.

    The difference is that of the block's mean, or of the mean over all columns if the block has none.
    """
    if not block.percent or not block.columns:
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
    whole = len(values) == len(row.cells)
    return Cell(sum(values) / len(values) if whole else None, any(cell.marked for cell in row.cells))
