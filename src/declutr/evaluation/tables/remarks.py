"""Remarks below the tables: missing scores with reasons, warnings, marks, doubts, sources."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from declutr.evaluation.senteval.data.taskdata import MARKS
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.runner.harness import Evaluated
from declutr.evaluation.tables.literature import PublishedModel


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
    for one in evaluated:
        warnings += [f"{one.encoder}: {warning}" for warning in one.warnings]
        reports = list(one.reports.values())
        results = [item for report in reports for item in report.results.items()]
        own = _grouped((MARKS[found.standing], name) for name, found in results if not found.comparable)
        marks += [f"{one.encoder}: {_labels(names)}: {why}" for why, names in own.items()]
        told = _grouped((warning, name) for name, found in results for warning in found.warnings)
        warnings += [f"{one.encoder}, {_labels(names)}: {warning}" for warning, names in told.items()]
        gone = _grouped((reason, name) for report in reports for name, reason in report.missing.items())
        missing += [f"{one.encoder}: {_labels(names)}: {reason}" for reason, names in gone.items()]
    doubts = _grouped(
        (f"{model.source}, {_labels(model.doubted)}: {model.doubt}", model.model) for model in published if model.doubt
    )
    marks += [f"{', '.join(names)} in {doubt}" for doubt, names in doubts.items()]
    numbers = {source: number for number, source in enumerate(dict.fromkeys(one.source for one in published), start=1)}
    names = {one.encoder for one in evaluated}
    differences = [
        f"{one.encoder}: to {one.pretrained}"
        + ("" if one.pretrained in names else ", which was not scored in this call")
        for one in evaluated
        if one.pretrained and one.pretrained != one.encoder
    ]
    differences += [f"{model.model}, published: to {model.pretrained}" for model in published if model.pretrained]
    return Remarks(
        tuple(missing), tuple(marks), tuple(warnings), _sources(published, numbers), numbers, tuple(differences)
    )


def _sources(published: Sequence[PublishedModel], numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Papers with their numbers and their aggregation of STS."""
    ways = {"mean": "mean of subsets", "wmean": "weighted mean", "all": "all pairs"}
    found = dict.fromkeys(
        (model.source, f"STS12-16 by {ways[model.sts]}" if model.split == "test" else "validation pairs of STS-B")
        for model in published
    )
    return tuple(
        f"{numbers[source]}: {source}; {way}; copied from the paper, not computed here" for source, way in found
    )


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, None]]:
    """Names by remark, each once, in order of appearance."""
    found: dict[str, dict[str, None]] = {}
    for remark, name in pairs:
        found.setdefault(remark, {})[name] = None
    return found


def _labels(names: Iterable[str]) -> str:
    return ", ".join(find(name).label for name in names)
