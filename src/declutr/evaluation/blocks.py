"""Blocks of a comparison: rows are encoders and published models, columns are tasks scored in one way.

Numbers that papers compute differently are in different blocks: STS12-16 three times (mean of subsets, weighted mean,
over all pairs), SICK-R and STS-B by regression and by cosine, STS-B in other languages on its test and on its
validation pairs, MRPC as mean of accuracy and F1 and as accuracy.

Published numbers are those of the DeCLUTR, SimCSE, SCD, VisualCSE, AudioCSE and SCL papers, copied from their tables
(`published.json`), with two decimals as printed. These papers aggregate STS12-16 in three ways; a score is stored only
under the name of its way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import Field, model_validator

from declutr.common.config import Strict
from declutr.evaluation.senteval.harness import Evaluated
from declutr.evaluation.senteval.scores import RECALLS, Average, Protocol, averages, headline
from declutr.evaluation.senteval.tasks import DOWNSTREAM, LANGUAGES, PROBING, STS, STSB_MULTI, TRANSFER, find

Scores = Mapping[str, float]


class PublishedModel(Strict):
    """Row of a paper's table."""

    model: str
    source: str
    """Paper and table numbers."""
    sts: Literal["mean", "wmean", "all"]
    """Aggregation of the subsets of STS12-16."""
    split: Literal["test", "dev"] = "test"
    """Split of the numbers of STS-B in other languages."""
    scores: Mapping[str, tuple[float, ...]]
    """Percent by task; for MRPC accuracy and F1 where both are printed."""
    pretrained: str = ""
    """Row of the same paper with the encoder from which this one was trained; "" if none."""
    doubt: str = ""
    """Reason to doubt some of these numbers."""
    doubted: tuple[str, ...] = ()
    """Tasks of the doubted numbers."""

    @model_validator(mode="after")
    def _tasks_are_known(self) -> "PublishedModel":
        for name in (*self.scores, *self.doubted):
            find(name)
        return self

    @property
    def protocol(self) -> Protocol:
        """Protocol of the numbers: STS-B and SICK-R by regression (senteval) or by cosine (simcse)."""
        return "senteval" if self.sts == "mean" else "simcse"

    def results(self) -> Mapping[str, Scores]:
        """Scores by task, named like the results of this project."""
        return {name: self._by_metric(name, values) for name, values in self.scores.items()}

    def _by_metric(self, task: str, values: tuple[float, ...]) -> Scores:
        procedure = find(task).procedure
        if procedure == "retrieval":  # the printed number is the mean of the six recalls
            return dict.fromkeys(RECALLS, values[0])
        correlations = {
            "similarity": f"spearman.{self.sts}",
            "relatedness": "spearman",
            "cosine": "spearman" if self.split == "test" else "devspearman",
        }
        if procedure in correlations:
            return {correlations[procedure]: values[0] / 100}
        return dict(zip(("acc", "f1"), values, strict=False))


class _Document(Strict):
    note: str
    papers: tuple[PublishedModel, ...] = Field(min_length=1)


@cache
def literature() -> tuple[PublishedModel, ...]:
    """All published rows, in the order of the papers."""
    return _Document.model_validate_json(files(__package__).joinpath("published.json").read_bytes()).papers


@dataclass(frozen=True)
class Cell:
    """Number of a table, or None."""

    value: float | None
    marked: bool = False
    """The number is doubted or not comparable with published ones (own data)."""
    signed: bool = False
    """The number is a difference."""


@dataclass(frozen=True)
class ModelRow:
    """Row of a table: an encoder or a published model."""

    label: str
    source: str
    """Paper of the model; "" for an encoder scored here."""
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Block:
    """One table; its rows start with those scored here."""

    name: str
    """Name for links."""
    short: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[ModelRow, ...]
    percent: bool = True
    """Values range from 0 to 100."""


@dataclass(frozen=True)
class _Model:
    """Common form of encoders scored here and published models."""

    label: str
    source: str
    results: Mapping[Protocol, Mapping[str, Scores]]
    marked: frozenset[str]
    geometry: Scores = field(default_factory=dict)

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
    rows = averages(model.results.get("senteval", {}), "senteval")
    return next(average for average in rows if average.name == name)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


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

_BLOCKS: tuple[tuple[str, str, str, Sequence[str], Value, Callable[[list[float]], float] | None], ...] = (
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


def compare(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel] = ()) -> tuple[Block, ...]:
    """Build the blocks that have at least one number of an encoder scored here.

    The average of complete rows comes last, marked if one of its numbers is. Columns without a number of an encoder
    scored here are removed, and then rows without numbers.
    """
    models = [*map(_scored_model, evaluated), *map(_published_model, published)]
    blocks = []
    for name, short, title, columns, value, average in _BLOCKS:
        heads = [_HEADS.get(column) or find(column).label for column in columns] + ["mean"] * (average is not None)
        rows = []
        for model in models:
            cells = [Cell(value(model, column), model.is_marked(column)) for column in columns]
            if average is not None:
                values = [cell.value for cell in cells if cell.value is not None]
                whole = average(values) if len(values) == len(columns) else None
                cells.append(Cell(whole, any(cell.marked for cell in cells)))
            rows.append(ModelRow(model.label, model.source, tuple(cells)))
        here = [row for row in rows if not row.source]
        shown = [place for place in range(len(heads)) if any(row.cells[place].value is not None for row in here)]
        rows = [replace(row, cells=tuple(row.cells[place] for place in shown)) for row in rows]
        filled = tuple(row for row in rows if any(cell.value is not None for cell in row.cells))
        if shown:
            shown_heads = tuple(heads[place] for place in shown)
            blocks.append(Block(name, short, title, shown_heads, filled, percent=name != "geometry"))
    return tuple(blocks)


def _scored_model(scored: Evaluated) -> _Model:
    results: dict[Protocol, dict[str, Scores]] = {}
    marked: set[str] = set()
    for protocol, report in scored.reports.items():
        results[protocol] = {name: result.scores for name, result in report.results.items()}
        marked |= {name for name, result in report.results.items() if not result.comparable}
    return _Model(scored.encoder, "", results, frozenset(marked), scored.geometry)


def _published_model(model: PublishedModel) -> _Model:
    return _Model(model.model, model.source, {model.protocol: model.results()}, frozenset(model.doubted))
