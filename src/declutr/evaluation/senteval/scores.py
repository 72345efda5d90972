"""A task's scores from the embeddings of its sentences, and the report over tasks with averages of complete sets.

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

Legend: N distinct sentences of a task, D embedding size.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from declutr.common.bootstrap import item_errors
from declutr.common.errors import DataError
from declutr.evaluation.senteval import protocols
from declutr.evaluation.senteval.classifier import examples
from declutr.evaluation.senteval.features import Table, table
from declutr.evaluation.senteval.network import ClassifierConfig
from declutr.evaluation.senteval.retrieval import RECALLS, Gallery, retrieval
from declutr.evaluation.senteval.similarity import Scored, pair_errors, score_geometry, score_sts
from declutr.evaluation.senteval.tasks import (
    DOWNSTREAM,
    LANGUAGES,
    PROBING,
    SETS,
    STS,
    STSB_MULTI,
    TRANSFER,
    SentEvalTask,
    Split,
    Standing,
    TaskData,
    find,
    sentence_rows,
)

_WITHOUT_SNLI = tuple(name for name in DOWNSTREAM if name != "SNLI")

Scores = Mapping[str, float]
Protocol = Literal["senteval", "simcse"]


@dataclass(frozen=True)
class Average:
    """Average over a set of tasks."""

    name: str
    value: float | None  # average in percent; None if a task is missing
    # Average of the dev scores, as DeCLUTR prints it (with STS12-16's test scores); None also if the set has none.
    dev: float | None = None
    missing: tuple[str, ...] = ()  # tasks of the set without a score
    # Tasks of the set whose data are not the published ones; such an average is not comparable.
    marked: tuple[str, ...] = ()


def headline(task: str, scores: Scores, protocol: Protocol = "senteval") -> float:
    """Number shown in a table, in percent."""
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
    """Number on dev data, in percent: the one by which a choice may be made."""
    procedure = find(task).procedure
    if procedure == "similarity":
        raise DataError(f"{task} has no dev score, because it has test data alone")
    if procedure in ("relatedness", "cosine"):  # a regression has no Spearman on dev
        return 100 * (scores["devspearman"] if "devspearman" in scores else scores["devpearson"])
    return scores["devacc"] / (len(RECALLS) if procedure == "retrieval" else 1)


def averages(
    results: Mapping[str, Scores], protocol: Protocol = "senteval", marked: Collection[str] = ()
) -> tuple[Average, ...]:
    """All averages of a protocol; only complete sets have a value.

    senteval: downstream, downstream without SNLI, probing, the means of both, all 28, and transfer; simcse: STS and
    transfer. Both have STS-B in ten languages if one of these has a score. `marked` are tasks whose data are not the
    published ones.
    """

    def average(name: str, tasks: tuple[str, ...], rounded: bool = False) -> Average:
        """Average of a set; `rounded`: of SimCSE's numbers, each rounded to two decimals."""
        missing = tuple(task for task in tasks if task not in results)
        value, dev = None, None
        if not missing and rounded:
            value = sum(float(f"{headline(task, results[task], 'simcse'):.2f}") for task in tasks) / len(tasks)
        elif not missing:
            value = sum(headline(task, results[task]) for task in tasks) / len(tasks)
            with_dev = [task for task in tasks if find(task).procedure != "similarity"]
            if all({"devacc", "devpearson", "devspearman"} & set(results[task]) for task in with_dev):
                # DeCLUTR's averages of dev scores take the test number of a task without dev data
                numbers = [(dev_headline if task in with_dev else headline)(task, results[task]) for task in tasks]
                dev = sum(numbers) / len(tasks)
        return Average(name, value, dev, missing, tuple(task for task in tasks if task in marked))

    last = [average("transfer", TRANSFER, rounded=True)]
    if any(task in results for task in STSB_MULTI):
        last.append(average(f"STS-B in {len(LANGUAGES)} languages", STSB_MULTI))
    if protocol == "simcse":
        return (average("STS", STS, rounded=True), *last)
    downstream, without_snli = average("downstream", DOWNSTREAM), average("downstream without SNLI", _WITHOUT_SNLI)
    probing = average("probing", PROBING)
    both = _mean_of("mean of downstream and probing", downstream, probing)
    both_without = _mean_of("mean of downstream without SNLI and probing", without_snli, probing)
    return (downstream, without_snli, probing, both, both_without, average("all 28 tasks", SETS["all"]), *last)


def _mean_of(name: str, first: Average, second: Average) -> Average:
    value, dev = (
        (one_half + other_half) / 2 if one_half is not None and other_half is not None else None
        for one_half, other_half in ((first.value, second.value), (first.dev, second.dev))
    )
    return Average(name, value, dev, first.missing + second.missing, first.marked + second.marked)


@dataclass(frozen=True)
class TaskResult:
    """Scores of one encoder on one task."""

    task: str
    protocol: Protocol  # Protocol that decides which number a table shows
    scores: Mapping[str, float]
    num_rows: int
    standing: Standing  # Standing of the data compared with the published ones
    warnings: tuple[str, ...] = ()
    # Errors of the test items in some of the scores (`Scored.items`); not in reports.
    items: Mapping[str, Sequence[float]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def headline(self) -> float:
        """Number shown in a table, in percent."""
        return headline(self.task, self.scores, self.protocol)

    @property
    def comparable(self) -> bool:
        """Return whether published numbers are comparable with it without a mark."""
        return self.standing == "identical"


@dataclass(frozen=True)
class Report:
    """Results of an encoder under a protocol, by task; `missing` says why: no data, refused data, or not requested."""

    encoder: str
    protocol: Protocol
    results: Mapping[str, TaskResult]
    missing: Mapping[str, str] = field(default_factory=dict)

    def averages(self) -> tuple[Average, ...]:
        """Averages of complete sets; an incomplete set has no value and names the missing tasks."""
        scores = {name: result.scores for name, result in self.results.items()}
        return averages(scores, self.protocol, {name for name, result in self.results.items() if not result.comparable})

    def to_json(self) -> dict[str, Any]:
        """Return all results, ready for `json.dumps`."""
        return {
            "encoder": self.encoder,
            "protocol": self.protocol,
            "results": {
                name: {**asdict(replace(result, items={})), "scores": dict(result.scores), "headline": result.headline}
                for name, result in self.results.items()
            },
            "missing": dict(self.missing),
            "averages": [asdict(average) for average in self.averages()],
        }


Method = Literal["procedure", "cosine", "geometry"]
"""procedure: the task's own in SentEval; cosine: of dev and test pairs, for tasks where SentEval trains a regression;
geometry: alignment and uniformity (STS-B)."""

Embeddings = NDArray[np.float32]


def method_for(task: SentEvalTask, protocol: Protocol) -> Method | None:
    """Method by which a protocol scores a task; None if the protocol leaves it out."""
    if protocol == "senteval":
        return "procedure"
    if task.name not in STS + TRANSFER + STSB_MULTI:
        return None
    return "cosine" if task.procedure == "relatedness" else "procedure"


def needs_fits(task: SentEvalTask, method: Method) -> bool:
    """Return whether the method trains something, which takes seconds to minutes; the others are arithmetic."""
    return method == "procedure" and task.procedure not in ("similarity", "cosine")


def cost(data: TaskData, method: Method, config: ClassifierConfig) -> float:
    """Relative cost for scheduling and for the remaining time: rows times fits, and equivalents for other methods."""
    rows, folds, decays = data.num_rows, config.num_folds, len(config.decays)
    if not needs_fits(data.task, method):
        return float(rows * (40 if method == "geometry" else 1))
    fits = {
        "inner_kfold": folds * (folds - 1) * decays,
        "kfold": folds * decays,
        "split": 1 if data.task.name == "SNLI" else decays,  # SNLI has one decay
        "relatedness": 250,  # one fit of up to 1,000 passes that no other fit can share batches with
        "retrieval": 60,
    }
    return float(rows * fits[data.task.procedure] * max(1.0, len(data.classes) / 50))  # WordContent has 1,000


def score(data: TaskData, method: Method, embeddings: Embeddings, config: ClassifierConfig) -> Scored:
    """Scores of a task from embeddings `(N, D)` of `sentences(data)`, in order; here SNLI has its own settings."""
    task, rows = data.task, sentence_rows([data])
    config = config.for_snli() if task.name == "SNLI" else config
    if method == "geometry":
        return Scored(score_geometry(data, rows, embeddings))
    if method == "cosine" or task.procedure in ("similarity", "cosine"):
        result = score_sts(data, rows, embeddings)
        if task.procedure == "similarity":
            return result
        kinds, splits_of = ("spearman", "pearson"), {"": "test", "dev": "dev"}
        scores = {f"{way}{kind}": result.scores[f"{kind}.{of}"] for way, of in splits_of.items() for kind in kinds}
        return Scored(scores, result.warnings, {"spearman": result.items["spearman.test"]})

    def features(split: Split) -> Table:
        first = embeddings[[rows[text] for text in split.first]]
        second = embeddings[[rows[text] for text in split.second]] if split.second else None
        return table(first, second, task.keep_both)

    splits = data.splits.items()  # train, dev and test, or those of the three that the procedure has
    if task.procedure == "relatedness":
        train, dev, test = (protocols.Pairs(features(part), np.asarray(part.labels, np.float64)) for _, part in splits)
        scores, predicted, _ = protocols.relatedness(train, dev, test, config.seed)
        flat = scores["devpearson"] <= 0 and scores["pearson"] == 0
        items = {"spearman": pair_errors(predicted, test.scores)}
        return Scored(scores, ("all predictions are equal: no correlation, counted as 0",) if flat else (), items)
    if task.procedure == "retrieval":
        galleries = (Gallery(table(data.features[name]).first, features(part).first) for name, part in splits)
        recalls, dev_total, _ = retrieval(*galleries, seed=config.seed)
        return Scored(dict(zip(RECALLS, recalls[: len(RECALLS)], strict=True)) | {"devacc": dev_total})
    fits: dict[str, Callable[..., protocols.Outcome]] = {
        "inner_kfold": protocols.inner_kfold,
        "kfold": protocols.kfold,
        "split": protocols.split,
    }
    parts = (examples(features(part), part.labels) for _, part in splits)
    scores, right, _ = fits[task.procedure](*parts, len(data.classes), config)
    return Scored(scores, items={"acc": item_errors(right.astype(np.float64))})
