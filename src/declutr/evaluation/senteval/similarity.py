"""Semantic textual similarity: cosines against human scores; and alignment, uniformity and collapse of embeddings.

Legend: R pairs, N embeddings or sentences, D embedding size, B rows of a block.

As the SimCSE family plots them (Wang and Isola 2020), alignment = E ||f(x) - f(x+)||^2 over pairs scored above 4, and
uniformity = log E exp(-2 ||f(x) - f(y)||^2) over all sentences, both on the unit sphere. SimCSE takes the pairs above 4
and "the whole STS-B dataset" (its authors in princeton-nlp/SimCSE#52): all three splits, each sentence as often as it
occurs. That is the default here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from torch import Tensor

from declutr.common import seeding
from declutr.common.bootstrap import item_errors, spearman_influence
from declutr.evaluation.senteval.tasks import TaskData
from declutr.trainer.objectives.scores import alignment, effective_rank

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """Scores by name (see the head of `scores.py`) and warnings to show with them."""

    scores: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    # Errors of the test items in some of the scores, in percent (`bootstrap.item_errors`).
    items: Mapping[str, Vector] = field(default_factory=dict)


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> Vector:
    """Cosines `(R,)` of rows of two `(R, D)` arrays; 0 for a pair with a zero vector, and for NaN.

    The arithmetic equals SentEval's to the last bit, pair by pair in the type of the embeddings.
    """
    left, right = np.nan_to_num(first), np.nan_to_num(second)
    with np.errstate(all="ignore"):  # a zero vector divides by zero; `nan_to_num` makes it 0
        pairs = zip(left, right, strict=True)
        # Ranks follow rounding: float64 moves a Spearman by up to 0.13 points (hashed words on STS12).
        values = [np.dot(u, v) / (np.linalg.norm(u) * np.linalg.norm(v)) for u, v in pairs]
    return np.nan_to_num(np.array(values)).astype(np.float64)


def correlate(predicted: Vector, gold: Vector) -> tuple[float, float]:
    """Pearson and Spearman (ties averaged) of `(R,)` values with `(R,)` gold scores; 0 if either are all equal."""
    if len(predicted) != len(gold) or len(gold) < 2:
        raise ValueError(f"{len(predicted)} values and {len(gold)} gold scores: no correlation")
    if np.ptp(predicted) == 0 or np.ptp(gold) == 0:  # a correlation would be NaN
        return 0.0, 0.0
    return float(pearsonr(predicted, gold).statistic), float(spearmanr(predicted, gold).statistic)


def aggregate(subsets: Mapping[str, tuple[Vector, Vector]]) -> Scored:
    """Correlations of `(cosines, gold)` of each subset, and the three ways in which papers aggregate them.

    `spearman.NAME` of each subset; `spearman.mean`, their mean (DeCLUTR's tables); `spearman.wmean`, weighted by
    numbers of pairs (SCL's tables); `spearman.all`, one correlation over all pairs of all subsets (tables of SimCSE and
    its followers); and the same with `pearson`.
    """
    parts = {name: correlate(*pair) for name, pair in subsets.items()}
    weights = np.array([len(gold) for _, gold in subsets.values()], dtype=np.float64)
    pooled = [np.concatenate(side) for side in zip(*subsets.values(), strict=True)]
    values = np.array(list(parts.values()))
    ways = {"mean": np.average(values, axis=0), "wmean": np.average(values, axis=0, weights=weights)}
    by_name = ways | {"all": correlate(*pooled)} | parts
    scores = {f"spearman.{name}": float(spearman) for name, (_, spearman) in by_name.items()}
    scores |= {f"pearson.{name}": float(pearson) for name, (pearson, _) in by_name.items()}
    items = {name: pair_errors(*pair) for name, pair in subsets.items()}
    items |= {
        "mean": np.concatenate([errors / len(items) for errors in items.values()]),
        "wmean": np.concatenate([errors * len(errors) / weights.sum() for errors in items.values()]),
        "all": pair_errors(*pooled),
    }
    flat = [name for name, pair in subsets.items() if any(np.ptp(side) == 0 for side in pair)]
    warnings = (f"no correlation in {', '.join(flat)} (all cosines are equal); counted as 0",) if flat else ()
    return Scored(scores, warnings, {f"spearman.{name}": errors for name, errors in items.items()})


def pair_errors(predicted: Vector, gold: Vector) -> Vector:
    """`(R,)` errors of the pairs in the Spearman of predicted and gold scores, in percent (`item_errors`)."""
    return item_errors(spearman_influence(np.stack([predicted, gold], axis=1)))


def score_sts(data: TaskData, rows: Mapping[str, int], embeddings: NDArray[np.floating]) -> Scored:
    """Scores of an STS task; subsets of SICK-R and STS-B are splits. `rows`: of sentences in `(N, D)` embeddings."""
    pairs = {}
    for name, split in data.splits.items():
        sides = (split.first, split.second or ())  # all of its rows are pairs
        first, second = (embeddings[[rows[text] for text in side]] for side in sides)
        pairs[name] = cosines(first, second), split.labels.astype(np.float64)
    return aggregate(pairs)


ABOVE = 4.0  # pairs scored higher than this count as positives

_BLOCK = 2048


def score_geometry(data: TaskData, rows: Mapping[str, int], embeddings: NDArray[np.floating]) -> dict[str, float]:
    """Alignment (0 is perfect), uniformity (lower is better), and the numbers of pairs and sentences behind them.

    `data` is STS-B, pairs with gold scores; `rows` has the row of each sentence in the `(N, D)` embeddings.
    """
    splits = data.splits.values()
    first = [rows[text] for split in splits for text in split.first]
    second = [rows[text] for split in splits for text in split.second or ()]
    (close,) = np.nonzero(np.concatenate([split.labels for split in splits]) > ABOVE)
    if not len(close):
        raise ValueError(f"{data.task.name}: no pair is scored above {ABOVE}")
    vectors = torch.from_numpy(np.asarray(embeddings))
    left, right = (vectors[np.array(side)[close]] for side in (first, second))
    return {
        "alignment": float(alignment(left.double(), right.double())),
        "uniformity": blockwise_uniformity(vectors[first + second]),
        "num_pairs": float(len(close)),
        "num_sentences": float(len(first) + len(second)),
    }


def blockwise_uniformity(embeddings: Tensor) -> float:
    """Uniformity of `(N, D)` embeddings, computed in blocks of B rows, so that N^2 distances are never held.

    Equals `declutr.trainer.objectives.scores.uniformity`, in the type of the embeddings, summed in float64;
    ||x - y||^2 = 2 - 2 x.y on the unit sphere.
    """
    unit = F.normalize(embeddings, dim=-1)
    number, total = len(unit), 0.0
    for start in range(0, number, _BLOCK):
        block = unit[start : start + _BLOCK]
        terms = (block @ unit[start:].T).clamp_(max=1).mul_(4).sub_(4).exp_()  # (B, N - start)
        total += float(terms[:, len(block) :].sum(dtype=torch.float64))
        own = terms[:, : len(block)]  # holds each pair of the block twice, and each row with itself
        total += float(own.sum(dtype=torch.float64) - own.diagonal().sum(dtype=torch.float64)) / 2
    return math.log(total / (number * (number - 1) / 2))


SAMPLE_ROWS = 2000
_SEED = 1111
_MAX_MEAN_COSINE = 0.99
_MIN_RANK = 3.0
_MAX_ZERO_SHARE = 0.01


def sample_rows(num_rows: int) -> NDArray[np.int64]:
    """Select at most 2,000 rows, drawn by key and sorted."""
    keys = seeding.words(_SEED, "collapse", np.arange(num_rows, dtype=np.uint64), np.zeros(num_rows, np.uint64), 1)
    return np.sort(np.argsort(keys.reshape(-1), kind="stable")[:SAMPLE_ROWS]).astype(np.int64)


def collapse_warnings(embeddings: NDArray[np.float32]) -> tuple[str, ...]:
    """Warnings to show next to every score of an encoder with such embeddings `(N, D)`; empty if all is well.

    Mean cosine of different rows, from the squared norm of the sum of unit vectors: (|sum u|^2 - N) / (N (N - 1)).
    """
    values = embeddings.astype(np.float64)
    norms = np.linalg.norm(values, axis=1)
    zero = int((norms == 0).sum())
    messages = []
    if zero > _MAX_ZERO_SHARE * len(values):
        messages.append(f"{zero:,} of {len(values):,} sampled embeddings are zero")
    unit = values[norms > 0] / norms[norms > 0, None]
    number = len(unit)
    if number > 1:
        mean = (float(np.square(unit.sum(axis=0)).sum()) - number) / (number * (number - 1))
        rank = effective_rank(torch.from_numpy(unit))
        if mean > _MAX_MEAN_COSINE:
            messages.append(f"collapsed: the mean cosine of two different sentences is {mean:.4f}")
        if rank < min(_MIN_RANK, values.shape[1]):
            messages.append(f"collapsed: embeddings fill {rank:.1f} of {values.shape[1]} dimensions (effective rank)")
    return tuple(messages)
