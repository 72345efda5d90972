"""A task's scores with their origin, and the report over tasks: averages of complete sets, missing tasks named.

Scores of a result, by procedure (units as in SentEval: accuracies, F1 and recalls in percent, correlations -1..1):
- inner_kfold, kfold, split: `acc`, `devacc`, and for MRPC `f1`;
- relatedness: `spearman`, `pearson`, `devpearson`, `mse`; by cosine (simcse): as `cosine` below;
- retrieval: `i2t_r1`, `i2t_r5`, `i2t_r10`, `t2i_r1`, `t2i_r5`, `t2i_r10`, and `devacc`, the sum of the six on dev;
- cosine: `spearman`, `pearson`, `devspearman`, `devpearson`;
- similarity: `spearman.mean`, `.wmean`, `.all`, of each subset, and the same with `pearson`.

The averages are those of SentEval, DeCLUTR and SimCSE. DeCLUTR (scripts/run_senteval.py): STS12-16 by the mean of the
subsets' Spearman, SICK-R and STS-B by the Spearman of the regression on test, MRPC by the mean of accuracy and F1, COCO
by the mean of six recalls, everything else by accuracy. Its first paper averages downstream (18 tasks) and probing (10)
and takes the mean of the two; the second leaves SNLI out. SimCSE (evaluation.py): seven STS tasks by one Spearman over
all pairs, seven transfer tasks by accuracy; values are rounded to two decimals before averaging. STS-B in ten languages
has an average of its own, the mean of the Spearman on test.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from declutr.common.errors import DataError
from declutr.evaluation.senteval.data.taskdata import Inspection, Standing
from declutr.evaluation.senteval.data.tasks import DOWNSTREAM, LANGUAGES, PROBING, STS, STSB_MULTI, TRANSFER, find

RECALLS = ("i2t_r1", "i2t_r5", "i2t_r10", "t2i_r1", "t2i_r5", "t2i_r10")
_WITHOUT_SNLI = tuple(name for name in DOWNSTREAM if name != "SNLI")

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Average:
    """Average over a set of tasks."""

    name: str
    value: float | None
    """Average in percent; None if a task is missing."""
    dev: float | None = None
    """Average of the dev scores, as DeCLUTR prints it (with STS12-16's test scores); None also if the set has none."""
    missing: tuple[str, ...] = ()
    """Tasks of the set without a score."""
    marked: tuple[str, ...] = ()
    """Tasks of the set whose data are not the published ones; such an average is not comparable."""


def headline(task: str, scores: Scores, protocol: Literal["senteval", "simcse"] = "senteval") -> float:
    """Number shown in a table, in percent.

    Raises:
        KeyError: a score that the number needs is missing.
    """
    procedure = find(task).procedure
    if procedure == "similarity":
        return 100 * scores["spearman.mean" if protocol == "senteval" else "spearman.all"]
    if procedure in ("relatedness", "cosine"):
        return 100 * scores["spearman"]
    if procedure == "retrieval":
        return sum(scores[name] for name in RECALLS) / len(RECALLS)
    if protocol == "senteval" and "f1" in scores:
        return (scores["acc"] + scores["f1"]) / 2
    return scores["acc"]


def dev_headline(task: str, scores: Scores) -> float:
    """Number on dev data, in percent: the one by which a choice may be made.

    Raises:
        DataError: the task has test data alone.
    """
    procedure = find(task).procedure
    if procedure == "similarity":
        raise DataError(f"{task} has no dev score, because it has test data alone")
    if procedure in ("relatedness", "cosine"):  # a regression has no Spearman on dev
        return 100 * (scores["devspearman"] if "devspearman" in scores else scores["devpearson"])
    return scores["devacc"] / (len(RECALLS) if procedure == "retrieval" else 1)


def averages(
    results: Mapping[str, Scores], protocol: Literal["senteval", "simcse"] = "senteval", marked: Collection[str] = ()
) -> tuple[Average, ...]:
    """All averages of a protocol; only complete sets have a value.

    senteval: downstream, downstream without SNLI, probing, the means of both, all 28, and transfer; simcse: STS and
    transfer. Both have STS-B in ten languages if one of these has a score. `marked` are tasks whose data are not the
    published ones.
    """
    chosen = any(task in results for task in STSB_MULTI)
    several = (_average(f"STS-B in {len(LANGUAGES)} languages", STSB_MULTI, results, marked),) if chosen else ()
    transfer = _average("transfer", TRANSFER, results, marked, rounded=True)
    if protocol == "simcse":
        return (_average("STS", STS, results, marked, rounded=True), transfer, *several)
    downstream = _average("downstream", DOWNSTREAM, results, marked)
    without_snli = _average("downstream without SNLI", _WITHOUT_SNLI, results, marked)
    probing = _average("probing", PROBING, results, marked)
    return (
        downstream,
        without_snli,
        probing,
        _mean_of("mean of downstream and probing", downstream, probing),
        _mean_of("mean of downstream without SNLI and probing", without_snli, probing),
        _average("all 28 tasks", DOWNSTREAM + PROBING, results, marked),
        transfer,
        *several,
    )


def _average(
    name: str, tasks: tuple[str, ...], results: Mapping[str, Scores], marked: Collection[str], rounded: bool = False
) -> Average:
    """Average of a set; `rounded`: of SimCSE's numbers, each rounded to two decimals."""
    missing = tuple(task for task in tasks if task not in results)
    marked_tasks = tuple(task for task in tasks if task in marked)
    if missing:
        return Average(name, None, None, missing, marked_tasks)
    if rounded:
        values = [float(f"{headline(task, results[task], 'simcse'):.2f}") for task in tasks]
        return Average(name, sum(values) / len(values), None, missing, marked_tasks)
    value = sum(headline(task, results[task]) for task in tasks) / len(tasks)
    has_dev = all(
        not find(task).has_dev or {"devacc", "devpearson", "devspearman"} & set(results[task]) for task in tasks
    )
    dev = sum(_declutrs_dev(task, results[task]) for task in tasks) / len(tasks) if has_dev else None
    return Average(name, value, dev, missing, marked_tasks)


def _declutrs_dev(task: str, scores: Scores) -> float:
    """Number in DeCLUTR's averages of dev scores, which take the test number of a task without dev data."""
    return dev_headline(task, scores) if find(task).has_dev else headline(task, scores)


def _mean_of(name: str, first: Average, second: Average) -> Average:
    value = (first.value + second.value) / 2 if first.value is not None and second.value is not None else None
    dev = (first.dev + second.dev) / 2 if first.dev is not None and second.dev is not None else None
    return Average(name, value, dev, first.missing + second.missing, first.marked + second.marked)


Protocol = Literal["senteval", "simcse"]


@dataclass(frozen=True)
class TaskResult:
    """Scores of one encoder on one task."""

    task: str
    protocol: Protocol
    """Protocol that decides which number a table shows."""
    scores: Mapping[str, float]
    num_rows: int
    standing: Standing
    """Standing of the data compared with the published ones."""
    warnings: tuple[str, ...] = ()

    @property
    def headline(self) -> float:
        """Number shown in a table, in percent."""
        return headline(self.task, self.scores, self.protocol)

    @property
    def dev_headline(self) -> float:
        """The same number on dev data.

        Raises:
            DataError: the task has none.
        """
        return dev_headline(self.task, self.scores)

    @property
    def comparable(self) -> bool:
        """Return whether published numbers are comparable with it without a mark."""
        return self.standing == "identical"


@dataclass(frozen=True)
class Report:
    """Results of one encoder under one protocol, by task.

    `missing` has the reason for each missing result: no data, refused data, or not requested.
    """

    encoder: str
    protocol: Protocol
    results: Mapping[str, TaskResult]
    missing: Mapping[str, str] = field(default_factory=dict)

    def averages(self) -> tuple[Average, ...]:
        """Averages of complete sets; an incomplete set has no value and names the missing tasks."""
        scores = {name: result.scores for name, result in self.results.items()}
        marked = {name for name, result in self.results.items() if not result.comparable}
        return averages(scores, self.protocol, marked)

    def to_json(self) -> dict[str, Any]:
        """Return all results, ready for `json.dumps`."""
        return {
            "encoder": self.encoder,
            "protocol": self.protocol,
            "results": {
                name: {**asdict(result), "scores": dict(result.scores), "headline": result.headline}
                for name, result in self.results.items()
            },
            "missing": dict(self.missing),
            "averages": [asdict(average) for average in self.averages()],
        }


def result_of(inspection: Inspection, protocol: Protocol, scores: Mapping[str, float], *warnings: str) -> TaskResult:
    """Combine scores with the standing and warnings of their data.

    Raises:
        ValueError: such data must not be scored.
    """
    if not inspection.usable or inspection.data is None:
        raise ValueError(f"{inspection.task.name}: {inspection.reason}")
    data = inspection.data
    scored = sum(len(split) for name, split in data.splits.items() if name not in ("train", "dev"))
    return TaskResult(
        inspection.task.name, protocol, dict(scores), scored, inspection.standing, (*warnings, *inspection.findings)
    )
