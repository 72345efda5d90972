"""Scores of one task from the embeddings of its sentences: by the task's own procedure, by cosine, or of the geometry.

Legend: N distinct sentences of a task, D embedding size.

SentEval's supervised relatedness (SICK-R, STS-B): softmax regression on five bins of a pair's score.

A score y in [1, 5] becomes the distribution over 1..5 with mean y (Tai et al., ACL 2015): 1 - (y - floor y) on floor y,
the rest on the next integer. The loss is the mean squared error of the probabilities, the optimizer Adam. Every 50
passes, the Pearson correlation of the predicted means on the dev set decides which state is kept. The fourth miss in
total stops the fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from declutr.evaluation.senteval.classifier import protocols
from declutr.evaluation.senteval.classifier.classifier import Examples, examples
from declutr.evaluation.senteval.classifier.config import ClassifierConfig
from declutr.evaluation.senteval.classifier.features import Table, orders, pair_table, table
from declutr.evaluation.senteval.classifier.network import DEFAULT_RATES, Network, Updates, linear_start
from declutr.evaluation.senteval.data.taskdata import Split, TaskData, sentence_rows
from declutr.evaluation.senteval.data.tasks import STS, STSB_MULTI, TRANSFER, SentEvalTask
from declutr.evaluation.senteval.scores.results import RECALLS, Protocol
from declutr.evaluation.senteval.scores.retrieval import RetrievalConfig, gallery, retrieval
from declutr.evaluation.senteval.scores.similarity import gold, score_geometry, score_sts

NUM_BINS = 5
_PASSES = 50  # passes between two dev scores
_MAX_PASSES = 1000
_BATCH = 64
_TENACITY = 3
_SCORING_ROWS = 1024
_FLAT = 1e-6  # smaller differences between predictions are float32 rounding, which can correlate with anything


@dataclass(frozen=True)
class Pairs:
    """Features of pairs and their gold scores (N,) in [1, 5].

    Raises:
        ValueError: unequal lengths, or a score outside 0 to 5.
    """

    features: Table
    scores: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.features) != len(self.scores) or not len(self.scores):
            raise ValueError(f"{len(self.features)} pairs but {len(self.scores)} scores")
        if not ((self.scores >= 0) & (self.scores <= NUM_BINS)).all():
            raise ValueError(
                f"scores must be 0 to {NUM_BINS}, found {self.scores.min()} to {self.scores.max()}; "
                "is this the right column?"
            )


@dataclass(frozen=True)
class Relatedness:
    """Correlations in -1..1, 0 if undefined."""

    dev_pearson: float
    pearson: float
    """Pearson on the test set; undefined if all predictions are equal to within 1e-6."""
    spearman: float
    """Spearman on the test set, ties averaged; undefined in the same case."""
    mse: float
    """Mean squared error on the test set."""
    predicted: NDArray[np.float64]
    """(N,) predicted scores of the test pairs."""
    num_passes: int
    """Passes over the training pairs until the fit stopped."""


def bins(scores: ArrayLike) -> NDArray[np.float32]:
    """Distributions (N, 5) of scores (N,); below score 1 the share of bin 0 is lost, as in the official code."""
    values = np.asarray(scores, np.float64)
    low = np.floor(values)
    levels = np.arange(1, NUM_BINS + 1)
    part = (values - low)[:, None]
    return np.where(levels == low[:, None], 1 - part, np.where(levels == low[:, None] + 1, part, 0)).astype(np.float32)


def relatedness(train: Pairs, dev: Pairs, test: Pairs, seed: int = 1111) -> Relatedness:
    """Fit on `train`, stop by `dev`, score `test`; the steps equal the official code's, as in `classifier.py`.

    A fit is one sequence of small steps, and no other fit can share its batches. The only gain over the official code
    is that gradients are written out.
    """
    target = torch.from_numpy(bins(train.scores))
    start = linear_start(train.features.width, NUM_BINS, torch.Generator().manual_seed(seed))
    network = Network([p[None, None].contiguous() for p in start])
    updates = Updates.start("adam", DEFAULT_RATES["adam"], torch.zeros(1, 1), network.parameters)
    permutations = orders(seed, 0, len(train.scores))
    best, kept, misses, num_passes, stopped = -1.0, network, 0, 0, False
    while not stopped and num_passes <= _MAX_PASSES:
        for _ in range(_PASSES):
            _pass(train.features, target, torch.from_numpy(next(permutations)), network, updates)
        num_passes += _PASSES
        pearson = _correlation(pearsonr, predict(network, dev.features), dev.scores)
        if pearson > best:
            best, kept = pearson, Network([p.clone() for p in network.parameters])
        else:
            stopped = misses >= _TENACITY
            misses += 1
    predicted = predict(kept, test.features)
    return Relatedness(
        dev_pearson=best,
        pearson=_correlation(pearsonr, predicted, test.scores),
        spearman=_correlation(spearmanr, predicted, test.scores),
        mse=float(((predicted - test.scores) ** 2).mean()),
        predicted=predicted,
        num_passes=num_passes,
    )


def predict(network: Network, features: Table) -> NDArray[np.float64]:
    """Means (N,) of the predicted distributions."""
    buffer = features.buffer(min(len(features), _SCORING_ROWS))
    places = torch.arange(len(features))
    parts = [
        torch.softmax(network.forward(features.take(part[None], buffer)).logits, 2)[0, 0]
        for part in places.split(_SCORING_ROWS)
    ]
    shares = torch.cat(parts, 1).numpy().astype(np.float64)
    return np.arange(1, NUM_BINS + 1) @ shares


def _pass(features: Table, target: Tensor, order: Tensor, network: Network, updates: Updates) -> None:
    buffer = features.buffer(_BATCH)
    gradients = [torch.empty_like(p) for p in network.parameters]
    targets = target[order].mT  # (bins, N): rows come last, as in the network
    for start, rows in zip(range(0, len(order), _BATCH), order.split(_BATCH), strict=True):
        done = network.forward(features.take(rows[None], buffer))
        shares = torch.softmax(done.logits, 2)
        # d mean((p - t)^2) / d logits = p * (g - sum(g * p)) with g = 2 (p - t) / (rows * bins)
        outer = (shares - targets[:, start : start + len(rows)]).mul_(2 / (len(rows) * NUM_BINS)).mul_(shares)
        network.backward(done, outer.sub_(shares * outer.sum(2, keepdim=True)), gradients)
        updates.step(network.parameters, gradients)


def _correlation(kind: Callable[..., Any], predicted: NDArray[np.float64], gold: NDArray[np.float64]) -> float:
    if np.ptp(predicted) < _FLAT or np.ptp(gold) == 0:
        return 0.0
    return float(kind(predicted, gold).statistic)


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
        result = score_sts(data, rows, embeddings)
        if task.procedure in ("cosine", "relatedness"):
            of_test, of_dev = result.subsets["test"], result.subsets["dev"]
            scores = {"spearman": of_test.spearman, "pearson": of_test.pearson}
            scores |= {"devspearman": of_dev.spearman, "devpearson": of_dev.pearson}
            return Scored(scores, result.warnings)
        return Scored(result.flat(), result.warnings)
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
        result = protocols.inner_kfold(part("all"), classes, config)
    elif task.procedure == "kfold":
        result = protocols.kfold(part("train"), part("test"), classes, config)
    else:
        chosen = config.for_snli() if task.name == "SNLI" else config
        chosen = chosen.for_word_content() if task.name == "WordContent" else chosen
        result = protocols.split(part("train"), part("dev"), part("test"), classes, chosen)
    scores = {"devacc": result.dev_accuracy, "acc": result.accuracy}
    return Scored(scores if result.f1 is None else {**scores, "f1": result.f1})


def _retrieval(data: TaskData, rows: Mapping[str, int], embeddings: Embeddings, seed: int) -> Scored:
    train, dev, test = (
        gallery(data.features[name], embeddings[[rows[text] for text in split.first]]) for name, split in _three(data)
    )
    result = retrieval(train, dev, test, RetrievalConfig(seed=seed))
    recalls = (*result.test.to_text[:3], *result.test.to_image[:3])
    return Scored({**dict(zip(RECALLS, recalls, strict=True)), "devacc": result.dev_total})


def _features(split: Split, rows: Mapping[str, int], embeddings: Embeddings, task: SentEvalTask) -> Table:
    first = embeddings[[rows[text] for text in split.first]]
    if split.second is None:
        return table(first)
    second = embeddings[[rows[text] for text in split.second]]
    return pair_table(first, second, keep_both=task.features == "pair_product_difference")


def _three(data: TaskData) -> list[tuple[str, Split]]:
    return [(name, data.splits[name]) for name in ("train", "dev", "test")]
