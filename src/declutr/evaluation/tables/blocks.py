"""Blocks of a comparison: rows are encoders and published models, columns are tasks scored in one way.

Numbers that papers compute differently are in different blocks: STS12-16 three times (mean of subsets, weighted mean,
over all pairs), SICK-R and STS-B by regression and by cosine, STS-B in other languages on its test and on its
validation pairs, MRPC as mean of accuracy and F1 and as accuracy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from declutr.evaluation.senteval.data.tasks import DOWNSTREAM, LANGUAGES, PROBING, STS, STSB_MULTI, TRANSFER, find
from declutr.evaluation.senteval.runner.harness import Evaluated
from declutr.evaluation.senteval.scores.results import Protocol, averages, headline
from declutr.evaluation.tables.literature import PublishedModel

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

Results = Mapping[str, Mapping[str, float]]


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
    results: Mapping[Protocol, Results]
    marked: frozenset[str]
    geometry: Mapping[str, float] = field(default_factory=dict)

    def scores(self, task: str, protocol: Protocol | None) -> Mapping[str, float]:
        """Scores of a task under a protocol; None accepts any, for tasks that both score alike."""
        for name, results in self.results.items():
            if protocol in (None, name) and task in results:
                return results[task]
        return {}


def compare(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel] = ()) -> tuple[Block, ...]:
    """Build the blocks that have at least one number of an encoder scored here."""
    models = [_scored_model(entry) for entry in evaluated] + [_published_model(entry) for entry in published]
    blocks = (
        _sts(models, "mean", "STS12-16, mean of the subsets (DeCLUTR's way)"),
        _sts(models, "wmean", "STS12-16, mean of the subsets weighted by pairs (SCL's way)"),
        _all(models),
        _languages(models, "test", "spearman", "STS-B in other languages by cosine, test pairs"),
        _languages(
            models, "dev", "devspearman", "STS-B in other languages by cosine, validation pairs (VisualCSE's way)"
        ),
        _block(
            models, "downstream", "Downstream by trained classifiers, as SentEval and DeCLUTR print them", _SUPERVISED
        ),
        _transfer(models),
        _block(models, "probing", "Probing, accuracy", PROBING),
        _averages(models),
        _averages(models, dev=True),
        _geometry(models),
    )
    return tuple(_scored_here(block) for block in blocks if any(not row.source for row in block.rows))


def _scored_here(block: Block) -> Block:
    """Remove columns without a number of an encoder scored here, then rows without numbers."""
    own = [row for row in block.rows if not row.source]
    kept = [place for place in range(len(block.columns)) if any(row.cells[place].value is not None for row in own)]
    rows = [replace(row, cells=tuple(row.cells[place] for place in kept)) for row in block.rows]
    filled = tuple(row for row in rows if any(cell.value is not None for cell in row.cells))
    return replace(block, columns=tuple(block.columns[place] for place in kept), rows=filled)


def _scored_model(scored: Evaluated) -> _Model:
    results = {
        protocol: {name: result.scores for name, result in report.results.items()}
        for protocol, report in scored.reports.items()
    }
    marked = {
        name for report in scored.reports.values() for name, score in report.results.items() if not score.comparable
    }
    return _Model(scored.encoder, "", results, frozenset(marked), scored.geometry)


def _published_model(model: PublishedModel) -> _Model:
    return _Model(model.model, model.source, {model.protocol: model.results()}, frozenset(model.doubted))


def _rows(
    models: Sequence[_Model],
    columns: Sequence[str],
    value: Callable[[_Model, str], float | None],
    average: Callable[[list[float]], float] | None = None,
) -> tuple[ModelRow, ...]:
    """Rows with a number; the `average` of complete rows comes last, marked if one of its numbers is."""
    rows = []
    for model in models:
        cells = [Cell(value(model, name), name in model.marked) for name in columns]
        if all(cell.value is None for cell in cells):
            continue
        if average is not None:
            values = [cell.value for cell in cells if cell.value is not None]
            whole = average(values) if len(values) == len(columns) else None
            cells.append(Cell(whole, any(cell.marked for cell in cells)))
        rows.append(ModelRow(model.label, model.source, tuple(cells)))
    return tuple(rows)


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(find(name).label for name in names)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _rounded_mean(values: list[float]) -> float:
    """Mean of values rounded to two decimals, as in SimCSE's tables."""
    return _mean([float(f"{value:.2f}") for value in values])


def _sts(models: Sequence[_Model], way: str, title: str) -> Block:
    def value(model: _Model, task: str) -> float | None:
        score = model.scores(task, None).get(f"spearman.{way}")
        return None if score is None else 100 * score

    return Block(f"sts-{way}", f"STS, {way}", title, (*_YEARS, "mean"), _rows(models, _YEARS, value, _mean))


def _all(models: Sequence[_Model]) -> Block:
    def value(model: _Model, task: str) -> float | None:
        key, protocol = ("spearman.all", None) if task in _YEARS else ("spearman", "simcse")
        score = model.scores(task, protocol).get(key)  # type: ignore[arg-type]
        return None if score is None else 100 * score

    title = "STS by cosine, one correlation over all pairs (SimCSE's way)"
    return Block("sts-all", "STS, all", title, (*_labels(STS), "mean"), _rows(models, STS, value, _rounded_mean))


def _languages(models: Sequence[_Model], split: str, key: str, title: str) -> Block:
    def value(model: _Model, task: str) -> float | None:
        score = model.scores(task, None).get(key)
        return None if score is None else 100 * score

    rows = _rows(models, STSB_MULTI, value, _mean)
    return Block(f"languages-{split}", f"Languages, {split}", title, (*LANGUAGES, "mean"), rows)


def _block(models: Sequence[_Model], name: str, title: str, tasks: tuple[str, ...]) -> Block:
    def value(model: _Model, task: str) -> float | None:
        scores = model.scores(task, "senteval")
        return headline(task, scores) if scores else None

    return Block(name, name.capitalize(), title, _labels(tasks), _rows(models, tasks, value))


def _transfer(models: Sequence[_Model]) -> Block:
    def value(model: _Model, task: str) -> float | None:
        return model.scores(task, None).get("acc")

    title = "Transfer, accuracy (SimCSE's seven)"
    return Block(
        "transfer", "Transfer", title, (*_labels(TRANSFER), "mean"), _rows(models, TRANSFER, value, _rounded_mean)
    )


def _averages(models: Sequence[_Model], dev: bool = False) -> Block:
    def value(model: _Model, name: str) -> float | None:
        rows = averages(model.results.get("senteval", {}), "senteval")
        return next(average.dev if dev else average.value for average in rows if average.name == name)

    marked = [  # all averages of a model with a marked task
        replace(model, marked=frozenset(_AVERAGES if model.marked & set(model.results.get("senteval", {})) else ()))
        for model in models
    ]
    name, short = ("averages-dev", "Averages, dev") if dev else ("averages", "Averages")
    title = (
        "Averages of scores on development data, which DeCLUTR's ablations print; STS12-16 by their test scores"
        if dev
        else "Averages of DeCLUTR's papers, of complete sets alone; published ones computed from the tables"
    )
    return Block(name, short, title, tuple(_AVERAGES.values()), _rows(marked, tuple(_AVERAGES), value))


def _geometry(models: Sequence[_Model]) -> Block:
    names = ("alignment", "uniformity")
    rows = _rows(models, names, lambda model, name: model.geometry.get(name))
    return Block(
        "geometry",
        "Geometry",
        "Alignment (0 is best) and uniformity (lower is better) on STS-B",
        names,
        rows,
        percent=False,
    )
