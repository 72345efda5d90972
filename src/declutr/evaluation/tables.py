"""Tables of results as Markdown and JSON, with remarks: missing scores, warnings, marks, doubts, sources.

A block of a comparison is one table: rows are encoders and published models, columns are tasks scored in one way.

Numbers that papers compute differently are in different blocks: STS12-16 three times (mean of subsets, weighted mean,
over all pairs), SICK-R and STS-B by regression and by cosine, STS-B in other languages on its test and on its
validation pairs, MRPC as mean of accuracy and F1 and as accuracy.

Published numbers are those of the DeCLUTR, SimCSE, SCD, VisualCSE, AudioCSE and SCL papers, copied from their tables
(`published.json`), with two decimals as printed. These papers aggregate STS12-16 in three ways; a score is stored only
under the name of its way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from declutr.common.config import Strict
from declutr.common.storage import read_json, write_json, write_text
from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.retrieval import RECALLS
from declutr.evaluation.senteval.scores import Average, Protocol, averages, headline
from declutr.evaluation.senteval.tasks import DOWNSTREAM, LANGUAGES, MARKS, PROBING, STS, STSB_MULTI, TRANSFER, find

Scores = Mapping[str, float]


class PublishedModel(Strict):
    """Row of a paper's table."""

    model: str
    source: str  # paper and table numbers
    sts: Literal["mean", "wmean", "all"]  # Aggregation of the subsets of STS12-16
    split: Literal["test", "dev"] = "test"  # split of the numbers of STS-B in other languages
    scores: Mapping[str, tuple[float, ...]]  # percent by task; for MRPC accuracy and F1 where both are printed
    pretrained: str = ""  # row of the same paper with the encoder from which this one was trained; "" if none
    doubt: str = ""  # reason to doubt some of these numbers
    doubted: tuple[str, ...] = ()  # tasks of the doubted numbers

    @property
    def protocol(self) -> Protocol:
        """Protocol of the numbers: STS-B and SICK-R by regression (senteval) or by cosine (simcse)."""
        return "senteval" if self.sts == "mean" else "simcse"

    def results(self) -> Mapping[str, Scores]:
        """Scores by task, named like the results of this project."""
        multilingual = "spearman" if self.split == "test" else "devspearman"
        correlations = {"similarity": f"spearman.{self.sts}", "relatedness": "spearman", "cosine": multilingual}
        results: dict[str, Scores] = {}
        for task, values in self.scores.items():
            procedure = find(task).procedure
            if procedure == "retrieval":  # the printed number is the mean of the six recalls
                results[task] = dict.fromkeys(RECALLS, values[0])
            elif procedure in correlations:
                results[task] = {correlations[procedure]: values[0] / 100}  # papers print percent
            else:
                results[task] = dict(zip(("acc", "f1"), values, strict=False))  # F1 is printed for MRPC alone
        return results


@cache
def literature() -> tuple[PublishedModel, ...]:
    """All published rows, in the order of the papers."""
    return tuple(map(PublishedModel.model_validate, read_json(Path(__file__).with_name("published.json"))["papers"]))


@dataclass(frozen=True)
class Cell:
    """Number of a table, or None."""

    value: float | None
    marked: bool = False  # the number is doubted or not comparable with published ones (own data)
    signed: bool = False  # the number is a difference


@dataclass(frozen=True)
class ModelRow:
    """Row of a table: an encoder or a published model."""

    label: str
    source: str  # paper of the model; "" for an encoder scored here
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Block:
    """One table; its rows start with those scored here."""

    name: str  # name for links
    short: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[ModelRow, ...]
    percent: bool = True  # values range from 0 to 100


@dataclass(frozen=True)
class _Model:
    """Common form of encoders scored here and published models."""

    label: str
    source: str
    pretrained: str
    results: Mapping[Protocol, Mapping[str, Scores]]
    marked: frozenset[str]
    geometry: Scores = field(default_factory=dict)

    def cells(self, columns: Sequence[str], value: "Value", average: "Mean | None") -> list[Cell]:
        """Numbers of the columns, and behind them the average of a complete row, marked if one of its numbers is."""
        cells = [Cell(value(self, column), self.is_marked(column)) for column in columns]
        return cells if average is None else [*cells, _mean_cell(cells, average)]

    def scores(self, task: str, protocol: Protocol | None = None) -> Scores:
        """Scores of a task under a protocol; None accepts any, for tasks that both score alike."""
        for name, results in self.results.items():
            if protocol in (None, name) and task in results:
                return results[task]
        return {}

    def is_marked(self, column: str) -> bool:
        """True for the column of a marked task, and for all averages with such a task."""
        return column in self.marked or (
            column in _AVERAGES and bool(self.marked & set(self.results.get("senteval", {})))
        )


Value = Callable[[_Model, str], float | None]
Mean = Callable[[list[float]], float]


def _correlation(key: str, protocol: Protocol | None = None) -> Value:
    def value(model: _Model, task: str) -> float | None:
        score = model.scores(task, protocol).get(key)
        return None if score is None else 100 * score

    return value


def _over_all_pairs(model: _Model, task: str) -> float | None:
    return (_correlation("spearman.all") if task in _YEARS else _correlation("spearman", "simcse"))(model, task)


def _headline(model: _Model, task: str) -> float | None:
    scores = model.scores(task, "senteval")
    return headline(task, scores) if scores else None


def _average(model: _Model, name: str) -> Average:
    return next(average for average in averages(model.results.get("senteval", {}), "senteval") if average.name == name)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _mean_cell(cells: Sequence[Cell], average: Mean = _mean) -> Cell:
    values = [cell.value for cell in cells if cell.value is not None]
    whole = len(values) == len(cells)  # means of different columns would be compared
    return Cell(average(values) if whole else None, any(cell.marked for cell in cells))


def _rounded_mean(values: list[float]) -> float:
    """Mean of values rounded to two decimals."""
    return _mean([float(f"{value:.2f}") for value in values])  # as SimCSE's script computes its tables


_YEARS = ("STS12", "STS13", "STS14", "STS15", "STS16")
_SUPERVISED = tuple(name for name in DOWNSTREAM if name not in _YEARS)
_AVERAGES = {
    "downstream": "downstream",
    "downstream without SNLI": "without SNLI",
    "probing": "probing",
    "mean of downstream and probing": "mean of the two",
    "mean of downstream without SNLI and probing": "mean, without SNLI",
    "all 28 tasks": "all 28",
}
_GEOMETRY = ("alignment", "uniformity")
_HEADS = _AVERAGES | dict(zip(STSB_MULTI, LANGUAGES, strict=True)) | {name: name for name in _GEOMETRY}
"""Heads of columns that are not a task's label."""

_BLOCKS: tuple[tuple[str, str, str, Sequence[str], Value, Mean | None], ...] = (
    ("sts-mean", "STS, mean", "STS12-16, mean of the subsets (DeCLUTR's way)",
     _YEARS, _correlation("spearman.mean"), _mean),
    ("sts-wmean", "STS, wmean", "STS12-16, mean of the subsets weighted by pairs (SCL's way)",
     _YEARS, _correlation("spearman.wmean"), _mean),
    ("sts-all", "STS, all", "STS by cosine, one correlation over all pairs (SimCSE's way)",
     STS, _over_all_pairs, _rounded_mean),
    ("languages-test", "Languages, test", "STS-B in other languages by cosine, test pairs",
     STSB_MULTI, _correlation("spearman"), _mean),
    ("languages-dev", "Languages, dev", "STS-B in other languages by cosine, validation pairs (VisualCSE's way)",
     STSB_MULTI, _correlation("devspearman"), _mean),
    ("downstream", "Downstream", "Downstream by trained classifiers, as SentEval and DeCLUTR print them",
     _SUPERVISED, _headline, None),
    ("transfer", "Transfer", "Transfer, accuracy (SimCSE's seven)",
     TRANSFER, lambda model, task: model.scores(task).get("acc"), _rounded_mean),
    ("probing", "Probing", "Probing, accuracy",
     PROBING, _headline, None),
    ("averages", "Averages", "Averages of DeCLUTR's papers, of complete sets alone; published ones computed from the "
     "tables", tuple(_AVERAGES), lambda model, name: _average(model, name).value, None),
    ("averages-dev", "Averages, dev", "Averages of scores on development data, which DeCLUTR's ablations print; "
     "STS12-16 by their test scores", tuple(_AVERAGES), lambda model, name: _average(model, name).dev, None),
    ("geometry", "Geometry", "Alignment (0 is best) and uniformity (lower is better) on STS-B",
     _GEOMETRY, lambda model, name: model.geometry.get(name), None),
)  # fmt: skip
"""Name, short name and title of each block, its columns, their values, and the average of complete rows."""


_COMPARED = ("mean of the two", "mean, without SNLI", "all 28", "downstream", "without SNLI", "probing", "mean")
"""Columns in order of preference for the difference; the first is the papers' Avg."""


def compare(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel] = ()) -> tuple[Block, ...]:
    """Build the blocks that have at least one number of an encoder scored here.

    The average of complete rows comes last. Columns without a number of an encoder scored here are removed, and then
    rows without numbers. A column of differences to the pretrained row of the same source is added if one has a number.
    """
    models = [
        _Model(
            scored.encoder,
            "",
            scored.pretrained,
            {name: {task: result.scores for task, result in of.results.items()} for name, of in scored.reports.items()},
            frozenset(task for of in scored.reports.values() for task, row in of.results.items() if not row.comparable),
            scored.geometry,
        )
        for scored in evaluated
    ]
    models += [
        _Model(model.model, model.source, model.pretrained, {model.protocol: model.results()}, frozenset(model.doubted))
        for model in published
    ]
    blocks = []
    for name, short, title, columns, value, average in _BLOCKS:
        heads = [_HEADS.get(column) or find(column).label for column in columns] + ["mean"] * (average is not None)
        rows = {(model.label, model.source): model.cells(columns, value, average) for model in models}
        here = [cells for (_, source), cells in rows.items() if not source]
        places = [place for place in range(len(heads)) if any(cells[place].value is not None for cells in here)]
        heads = [heads[place] for place in places]
        rows = {key: [cells[place] for place in places] for key, cells in rows.items()}
        rows = {key: cells for key, cells in rows.items() if any(cell.value is not None for cell in cells)}
        percent = name != "geometry"
        if percent:
            compared = next((head for head in _COMPARED if head in heads), "")
            numbers = {
                key: cells[heads.index(compared)] if compared else _mean_cell(cells) for key, cells in rows.items()
            }
            starts = {(model.label, model.source): (model.pretrained, model.source) for model in models}
            differences = {key: _difference(numbers, starts[key], key) for key in rows}
            if any(cell.value is not None for cell in differences.values()):
                heads.append(f"Δ {compared or 'mean'}")
                rows = {key: [*cells, differences[key]] for key, cells in rows.items()}
        if places:
            model_rows = tuple(ModelRow(*key, tuple(cells)) for key, cells in rows.items())
            blocks.append(Block(name, short, title, tuple(heads), model_rows, percent))
    return tuple(blocks)


def _difference(numbers: Mapping[tuple[str, str], Cell], start: tuple[str, str], key: tuple[str, str]) -> Cell:
    after, before = numbers[key], numbers.get(start, Cell(None))
    if start == key or after.value is None or before.value is None:
        return Cell(None, signed=True)
    return Cell(after.value - before.value, after.marked or before.marked, signed=True)


class Remarks(NamedTuple):
    """Remarks on tables."""

    parts: tuple[tuple[str, tuple[str, ...]], ...]  # title and lines of each kind of remarks that has lines
    numbers: Mapping[str, int]  # number of each paper


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
    lines = ["# Sentence encoders on SentEval"]
    for block in blocks:
        rows = [["", *block.columns], ["---", *("---:" for _ in block.columns)]]
        for row in block.rows:
            label = _plain(row.label)
            label = f"*{label}*, published ({notes.numbers[row.source]})" if row.source else f"**{label}**"
            rows.append([label, *(shown(cell, block.percent) for cell in row.cells)])
        lines += ["", f"## {block.title}", "", *(f"| {' | '.join(cells)} |" for cells in rows)]
    for title, remarks_of_kind in notes.parts:
        lines += ["", f"## {title}", "", *(f"- {_plain(line)}" for line in remarks_of_kind)]
    return "\n".join([*lines, ""])


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
    blocks = compare(evaluated, published)
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
    return markdown(compare(evaluated), remarks(evaluated, ()))
