"""Scores of one task from the embeddings of its sentences: by the task's own procedure, by cosine, or of the geometry.

Legend: N distinct sentences of a task, D embedding size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.evaluation.senteval.classifier import protocols
from declutr.evaluation.senteval.classifier.classifier import Examples, examples
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import Table, pair_table, table
from declutr.evaluation.senteval.data.taskdata import Split, TaskData, sentence_rows
from declutr.evaluation.senteval.data.tasks import STS, STSB_MULTI, TRANSFER, SentEvalTask
from declutr.evaluation.senteval.scores.relatedness import Pairs, relatedness
from declutr.evaluation.senteval.scores.results import RECALLS, Protocol
from declutr.evaluation.senteval.scores.retrieval import RetrievalConfig, gallery, retrieval
from declutr.evaluation.senteval.scores.similarity import gold, score_geometry, score_sts

Method = Literal["procedure", "cosine", "geometry"]
"""procedure: the task's own in SentEval; cosine: of dev and test pairs, for tasks where SentEval trains a regression;
geometry: alignment and uniformity (STS-B)."""

Embeddings = NDArray[np.float32]


@dataclass(frozen=True)
class Scored:
    """Scores by name (see `results.py` and `similarity.py`) and warnings to show with them."""

    scores: Mapping[str, float]
    warnings: tuple[str, ...] = ()


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
        "split": 1 if data.task.name == "SNLI" else decays,
        "relatedness": 250,  # one fit of up to 1,000 passes that no other fit can share batches with
        "retrieval": 60,
    }
    return float(rows * fits[data.task.procedure] * max(1.0, len(data.classes) / 50))


def score(data: TaskData, method: Method, embeddings: Embeddings, config: ClassifierConfig) -> Scored:
    """Compute the scores of a task from the embeddings `(N, D)` of `sentences(data)`, in that order.

    The exceptions from the classifier settings for SNLI and WordContent are applied here.

    Raises:
        ValueError: data or embeddings that cannot be fitted, such as a class smaller than the number of folds.
    """
    rows = sentence_rows([data])
    task = data.task
    if method == "geometry":
        return Scored(score_geometry(data, rows, embeddings))
    if method == "cosine" or task.procedure in ("similarity", "cosine"):
        found = score_sts(data, rows, embeddings)
        if task.procedure in ("cosine", "relatedness"):
            of_test, of_dev = found.subsets["test"], found.subsets["dev"]
            scores = {"spearman": of_test.spearman, "pearson": of_test.pearson}
            scores |= {"devspearman": of_dev.spearman, "devpearson": of_dev.pearson}
            return Scored(scores, found.warnings)
        return Scored(found.flat(), found.warnings)
    if task.procedure == "relatedness":
        train, dev, test = (Pairs(_features(split, rows, embeddings, task), gold(split)) for _, split in _three(data))
        fit = relatedness(train, dev, test, config.seed)
        flat = fit.dev_pearson <= 0 and fit.pearson == 0
        scores = {"devpearson": fit.dev_pearson, "pearson": fit.pearson, "spearman": fit.spearman, "mse": fit.mse}
        return Scored(scores, ("all predictions are equal: no correlation, counted as 0",) if flat else ())
    if task.procedure == "retrieval":
        return _retrieval(data, rows, embeddings, config.seed)
    return _classified(data, rows, embeddings, config)


def _classified(data: TaskData, rows: Mapping[str, int], embeddings: Embeddings, config: ClassifierConfig) -> Scored:
    task, classes = data.task, len(data.classes)

    def part(name: str) -> Examples:
        split = data.splits[name]
        return examples(_features(split, rows, embeddings, task), split.labels)

    if task.procedure == "inner_kfold":
        found = protocols.inner_kfold(part("all"), classes, config)
    elif task.procedure == "kfold":
        found = protocols.kfold(part("train"), part("test"), classes, config)
    else:
        chosen = config.for_snli() if task.name == "SNLI" else config
        chosen = chosen.for_word_content() if task.name == "WordContent" else chosen
        found = protocols.split(part("train"), part("dev"), part("test"), classes, chosen)
    scores = {"devacc": found.dev_accuracy, "acc": found.accuracy}
    return Scored(scores if found.f1 is None else {**scores, "f1": found.f1})


def _retrieval(data: TaskData, rows: Mapping[str, int], embeddings: Embeddings, seed: int) -> Scored:
    train, dev, test = (
        gallery(data.features[name], embeddings[[rows[text] for text in split.first]]) for name, split in _three(data)
    )
    found = retrieval(train, dev, test, RetrievalConfig(seed=seed))
    recalls = (*found.test.to_text[:3], *found.test.to_image[:3])
    return Scored({**dict(zip(RECALLS, recalls, strict=True)), "devacc": found.dev_total})


def _features(split: Split, rows: Mapping[str, int], embeddings: Embeddings, task: SentEvalTask) -> Table:
    first = embeddings[[rows[text] for text in split.first]]
    if split.second is None:
        return table(first)
    second = embeddings[[rows[text] for text in split.second]]
    return pair_table(first, second, keep_both=task.features == "pair_product_difference")


def _three(data: TaskData) -> list[tuple[str, Split]]:
    return [(name, data.splits[name]) for name in ("train", "dev", "test")]
