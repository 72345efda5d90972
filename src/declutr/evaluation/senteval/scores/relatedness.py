"""SentEval's supervised relatedness (SICK-R, STS-B): softmax regression on five bins of a pair's score.

A score y in [1, 5] becomes the distribution over 1..5 with mean y (Tai et al., ACL 2015): 1 - (y - floor y) on floor y,
the rest on the next integer. The loss is the mean squared error of the probabilities, the optimizer Adam. Every 50
passes, the Pearson correlation of the predicted means on the dev set decides which state is kept. The fourth miss in
total stops the fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from declutr.evaluation.senteval.classifier.features import Table, orders
from declutr.evaluation.senteval.classifier.network import DEFAULT_RATES, Network, Updates, linear_start

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
