"""Alignment and uniformity of an encoder on STS-B (Wang and Isola 2020), as the SimCSE family plots them.

alignment = E ||f(x) - f(x+)||^2 over pairs scored above 4, uniformity = log E exp(-2 ||f(x) - f(y)||^2) over all
sentences, both on the unit sphere. SimCSE takes the pairs above 4 and "the whole STS-B dataset" (its authors in
princeton-nlp/SimCSE#52): all three splits, each sentence as often as it occurs. That is the default here.

Legend: N sentences, D embedding size, B rows of a block.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from declutr.common import seeding
from declutr.evaluation.senteval.data.taskdata import TaskData
from declutr.trainer.objectives.measures import alignment, effective_rank

ABOVE = 4.0
"""Pairs scored higher than this count as positives."""

_BLOCK = 2048


def score_geometry(data: TaskData, rows: Mapping[str, int], embeddings: NDArray[np.floating]) -> dict[str, float]:
    """Alignment (0 is perfect), uniformity (lower is better), and the numbers of pairs and sentences behind them.

    `data` is STS-B, pairs with gold scores; `rows` has the row of each sentence in the `(N, D)` embeddings.

    Raises:
        ValueError: no pair is scored above 4.
    """
    first, second, gold = [], [], []
    for split in data.splits.values():
        if split.second is None:
            raise ValueError(f"{data.task.name} has no pairs")
        first += [rows[text] for text in split.first]
        second += [rows[text] for text in split.second]
        gold += split.labels.tolist()
    close = [index for index, score in enumerate(gold) if score > ABOVE]
    if not close:
        raise ValueError(f"{data.task.name}: no pair is scored above {ABOVE}")
    vectors = torch.from_numpy(np.asarray(embeddings))
    one, two = (vectors[[side[index] for index in close]] for side in (first, second))
    return {
        "alignment": float(alignment(one.double(), two.double())),
        "uniformity": blockwise_uniformity(vectors[first + second]),
        "num_pairs": float(len(close)),
        "num_sentences": float(len(first) + len(second)),
    }


def blockwise_uniformity(embeddings: Tensor) -> float:
    """Uniformity of `(N, D)` embeddings, computed in blocks of B rows, so that N^2 distances are never held.

    Equals `declutr.trainer.objectives.measures.uniformity`, in the type of the embeddings, summed in float64;
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
    told = []
    if zero > _MAX_ZERO_SHARE * len(values):
        told.append(f"{zero:,} of {len(values):,} sampled embeddings are zero")
    unit = values[norms > 0] / norms[norms > 0, None]
    number = len(unit)
    if number > 1:
        mean = (float(np.square(unit.sum(axis=0)).sum()) - number) / (number * (number - 1))
        rank = effective_rank(torch.from_numpy(unit))
        if mean > _MAX_MEAN_COSINE:
            told.append(f"collapsed: the mean cosine of two different sentences is {mean:.4f}")
        if rank < min(_MIN_RANK, values.shape[1]):
            told.append(f"collapsed: embeddings fill {rank:.1f} of {values.shape[1]} dimensions (effective rank)")
    return tuple(told)
