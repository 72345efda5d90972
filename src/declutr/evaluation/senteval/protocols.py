"""SentEval's ways from features to a score, with the official rounding.

    inner_kfold  MR CR SUBJ MPQA        one table: folds, and inner folds in each fold's training part
    kfold        TREC MRPC              train and test: folds of train choose the weight decay
    split        SST SICK-E SNLI, probing   train, dev and test

Scores are in percent. Means are rounded to two decimals wherever the official code rounds them, because a weight decay
is chosen among rounded means, and the first of equal ones wins.

Relatedness (SICK-R, STS-B) is a softmax regression on five bins of a pair's score. A score y in [1, 5] becomes the
distribution over 1..5 with mean y (Tai et al., ACL 2015): 1 - (y - floor y) on floor y, the rest on the next integer.
The loss is the mean squared error of the probabilities, the optimizer Adam. Every 50 passes, the Pearson correlation of
the predicted means on the dev set decides which state is kept. The fourth miss in total stops the fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from declutr.evaluation.senteval.classifier import Examples, fit_many
from declutr.evaluation.senteval.features import BlockBuffer, Table, TrainingSet, hold_out, orders, stratified_folds
from declutr.evaluation.senteval.network import DEFAULT_RATES, ClassifierConfig, Network, Updates, linear_start

Outcome = tuple[dict[str, float], NDArray[np.bool_], list[float]]
"""Scores in percent, `(N,)` true for test rows that were classified right, fold after fold, and accuracies of folds.

devacc: mean over outer folds of the chosen decay's cross-validation, or accuracy on the dev set. acc: accuracy on the
test rows; over folds the mean. f1: of class 1 on the test rows, for tasks with two classes and a test set (kfold).
"""


def inner_kfold(data: Examples, num_classes: int, config: ClassifierConfig) -> Outcome:
    """Nested cross-validation: k*(4*k + 1) fits with four decays, 410 for k = 10."""
    labels = data.labels.numpy()
    outer = stratified_folds(labels, config.num_folds)
    inner = [
        [TrainingSet(rows[train], rows[dev]) for train, dev in stratified_folds(labels[rows], config.num_folds)]
        for rows, _ in outer
    ]
    fits = fit_many(data, data, [s for sets in inner for s in sets], config.decays, config, num_classes)
    num_folds = config.num_folds
    means = [_means(fits.accuracies[num_folds * fold : num_folds * (fold + 1)]) for fold in range(num_folds)]
    chosen = [int(np.argmax(mean)) for mean in means]
    best = [[config.decays[decay]] for decay in chosen]
    refits = fit_many(data, data, [hold_out(train, config.seed) for train, _ in outer], best, config, num_classes)
    right = [refits.predict(fold, 0, data.features, test) == labels[test] for fold, (_, test) in enumerate(outer)]
    tests = [_percent(own) for own in right]
    dev_accuracy = float(np.round(np.mean([max(mean) for mean in means]), 2))
    return {"devacc": dev_accuracy, "acc": float(np.round(np.mean(tests), 2))}, np.concatenate(right), tests


def kfold(train: Examples, test: Examples, num_classes: int, config: ClassifierConfig) -> Outcome:
    """Cross-validation on `train` chooses the decay; a refit on 95% of `train` is tested."""
    labels = train.labels.numpy()
    sets = [TrainingSet(*fold) for fold in stratified_folds(labels, config.num_folds, config.seed)]
    means = _means(fit_many(train, train, sets, config.decays, config, num_classes).accuracies)
    chosen = int(np.argmax(means))  # the first of equal ones, as in the official code
    refit = fit_many(
        train, train, [hold_out(np.arange(len(labels)), config.seed)], [config.decays[chosen]], config, num_classes
    )
    truth, answers = test.labels.numpy(), refit.predict(0, 0, test.features)
    scores = {"devacc": max(means), "acc": _percent(answers == truth)}
    return scores | ({"f1": _f1(answers, truth)} if num_classes == 2 else {}), answers == truth, [scores["acc"]]


def split(train: Examples, dev: Examples, test: Examples, num_classes: int, config: ClassifierConfig) -> Outcome:
    """Let the dev set stop the fits and choose the decay."""
    only = TrainingSet(np.arange(len(train.labels)), np.arange(len(dev.labels)))
    fits = fit_many(train, dev, [only], config.decays, config, num_classes)
    scores = [round(100 * accuracy, 2) for accuracy in fits.accuracies[0].tolist()]
    chosen = int(np.argmax(scores))
    # The official code repeats this fit with the same seed, which gives the same weights.
    right = fits.predict(0, chosen, test.features) == test.labels.numpy()
    return {"devacc": scores[chosen], "acc": _percent(right)}, right, [_percent(right)]


def _means(accuracies: NDArray[np.float64]) -> list[float]:
    """Mean over sets of the accuracies (S, R) of each decay, in percent, as numpy rounds it."""
    # of equal rounded means, the first wins
    return [float(np.round(100 * np.mean(own), 2)) for own in accuracies.T.copy()]


def _percent(right: NDArray[np.bool_]) -> float:
    return round(100 * (int(right.sum()) / len(right)), 2)  # Python's rounding, not numpy's


def _f1(answers: NDArray[np.int64], truth: NDArray[np.int64]) -> float:
    """F1 of class 1 in percent; 0 if no row has or is predicted class 1."""
    true = int(((answers == 1) & (truth == 1)).sum())
    called = int((answers == 1).sum() + (truth == 1).sum())
    return round(100 * (2 * true / called), 2) if called else 0.0


NUM_BINS = 5
_PASSES = 50  # passes between two dev scores
_MAX_PASSES = 1000  # and _PASSES, _BATCH and _TENACITY: those of SentEval
_BATCH = 64
_TENACITY = 3
_SCORING_ROWS = 1024
_FLAT = 1e-6  # smaller differences between predictions are float32 rounding, which can correlate with anything


@dataclass(frozen=True)
class Pairs:
    """Features of pairs and their gold scores (N,), which the reader of their file has checked to be in [0, 5]."""

    features: Table
    scores: NDArray[np.float64]

    def __post_init__(self) -> None:
        if not len(self.scores):
            raise ValueError("a split has no pairs, and a regression needs some to learn from, to stop by and to test")


def bins(scores: ArrayLike) -> NDArray[np.float32]:
    """Distributions (N, 5) of scores (N,); below score 1 the share of bin 0 is lost, as in the official code."""
    values = np.asarray(scores, np.float64)
    low = np.floor(values)
    levels = np.arange(1, NUM_BINS + 1)
    part = (values - low)[:, None]
    return np.where(levels == low[:, None], 1 - part, np.where(levels == low[:, None] + 1, part, 0)).astype(np.float32)


def relatedness(
    train: Pairs, dev: Pairs, test: Pairs, seed: int = 1111
) -> tuple[dict[str, float], NDArray[np.float64], int]:
    """Fit on `train`, stop by `dev`, score `test`; the steps equal the official code's, as in `classifier.py`.

    Returns:
        Correlations in -1..1, 0 if undefined: `devpearson`, and on the test set `pearson` and `spearman` (ties
        averaged), which are undefined if all predictions are equal to within 1e-6, and `mse`; the (N,) predicted
        scores of the test pairs; and the number of passes until the fit stopped.
    """
    target = torch.from_numpy(bins(train.scores))
    start = linear_start(train.features.width, NUM_BINS, torch.Generator().manual_seed(seed))
    network = Network([p[None, None].contiguous() for p in start])
    updates = Updates.start("adam", DEFAULT_RATES["adam"], torch.zeros(1, 1), network.parameters)
    permutations = orders(seed, 0, len(train.scores))
    best, kept, misses, num_passes, stopped = -1.0, network, 0, 0, False  # a correlation is never below -1
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
    correlations = {
        name: _correlation(kind, predicted, test.scores)
        for name, kind in (("pearson", pearsonr), ("spearman", spearmanr))
    }
    scores = {"devpearson": best} | correlations | {"mse": float(((predicted - test.scores) ** 2).mean())}
    return scores, predicted, num_passes


def predict(network: Network, features: Table) -> NDArray[np.float64]:
    """Means (N,) of the predicted distributions."""
    buffer = BlockBuffer(features, 1, _SCORING_ROWS)
    batches = torch.arange(len(features)).split(_SCORING_ROWS)
    parts = [torch.softmax(network.forward(buffer.take(part[None])), 2)[0, 0] for part in batches]
    shares = torch.cat(parts, 1).numpy().astype(np.float64)
    return np.arange(1, NUM_BINS + 1) @ shares


def _pass(features: Table, target: Tensor, order: Tensor, network: Network, updates: Updates) -> None:
    buffer = BlockBuffer(features, 1, _BATCH)
    gradients = [torch.empty_like(p) for p in network.parameters]
    targets = target[order].mT  # (bins, N): rows come last, as in the network
    for start, places in zip(range(0, len(order), _BATCH), order.split(_BATCH), strict=True):
        rows = buffer.take(places[None])
        shares = torch.softmax(network.forward(rows), 2)
        # d mean((p - t)^2) / d logits = p * (g - sum(g * p)) with g = 2 (p - t) / (rows * bins)
        outer = (shares - targets[:, start : start + len(places)]).mul_(2 / (len(places) * NUM_BINS)).mul_(shares)
        network.backward(rows, outer.sub_(shares * outer.sum(2, keepdim=True)), gradients)
        updates.step(network.parameters, gradients)


def _correlation(kind: Callable[..., Any], predicted: NDArray[np.float64], gold: NDArray[np.float64]) -> float:
    if np.ptp(predicted) < _FLAT or np.ptp(gold) == 0:
        return 0.0
    return float(kind(predicted, gold).statistic)
