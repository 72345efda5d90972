"""Measures of embeddings: retrieval of pairs, alignment, uniformity, effective rank, spread of a training batch.

Legend: N rows, H embedding size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from declutr.trainer.objectives.row_score import RowScore
from numpy.typing import NDArray
from torch import Tensor

from declutr.common.seeding import U64

SPREAD = ("batch_uniformity", "batch_participation_ratio")
"""Names of the numbers of `spread` in the metrics."""
_SPREAD_ROWS = 256  # enough for both numbers, and few enough to cost nothing next to a step


def by_size(sizes: Iterable[int], scores: Callable[[int | None], dict[str, float]]) -> dict[str, float]:
    """Scores of the whole embedding by name, and those of its first numbers as `NAME_SIZE`.

    Args:
        sizes: numbers of first numbers.
        scores: computes the scores of embeddings cut to a size; None: whole ones.
    """
    return scores(None) | {f"{name}_{size}": value for size in sizes for name, value in scores(size).items()}


def ahead(scores: NDArray[Any], answers: NDArray[Any], tie: float) -> NDArray[np.float64]:
    """`(N,)` candidates before the answer of each query by score, the measure of every retrieval of this project.

    Args:
        scores: `(N, M)` scores of M candidates; `(1, M)` are those of all queries.
        answers: `(N,)` score of each query's answer.
        tie: share of the candidates with the answer's own score that count, the answer included if it is a candidate.
            1 counts them against the encoder, so that equal embeddings do not look perfect; 0.5 is the mean of orders.
    """
    own = answers[:, None]
    before: NDArray[np.float64] = (scores > own).sum(axis=1) + tie * (scores == own).sum(axis=1)
    return before


def retrieval(anchors: Tensor, positives: Tensor, keys: U64) -> dict[str, float]:
    """Recall@1 and mean reciprocal rank of each anchor's positive among all N positives, by cosine; scores of rows.

    Ties count against the encoder.

    Args:
        anchors: `(N, H)`.
        positives: `(N, H)`.
        keys: `(N,)` keys of the rows.
    """
    scores = (F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).T).numpy()
    ranks = ahead(scores, scores.diagonal(), tie=1.0)
    return {"recall_at_1": RowScore(keys, (ranks == 1).astype(np.float64)), "mrr": RowScore(keys, 1 / ranks)}


def alignment(anchors: Tensor, positives: Tensor) -> float:
    """Mean squared distance of pairs on the unit sphere (Wang and Isola 2020); 0 is perfect."""
    return float((F.normalize(anchors, dim=-1) - F.normalize(positives, dim=-1)).square().sum(dim=-1).mean())


def uniformity(embeddings: Tensor) -> float:
    """Log of the mean of exp(-2 ||x - y||^2) over pairs on the unit sphere (Wang and Isola 2020); lower is better."""
    distances = torch.pdist(F.normalize(embeddings, dim=-1)).square()
    return float(distances.mul(-2).exp().mean().log())


def effective_rank(embeddings: Tensor) -> float:
    """Exp of the entropy of the normalised singular values of centred unit embeddings (Roy and Vetterli 2007)."""
    unit = F.normalize(embeddings, dim=-1)
    values = torch.linalg.svdvals(unit - unit.mean(dim=0))
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return float(torch.special.entr(shares).sum().exp())


def spread(views: Tensor) -> Tensor:
    """`(2,)` float64: uniformity and participation ratio of the first views of at most 256 rows; NaN of one row.

    The participation ratio (sum of eigenvalues)^2 / sum of their squares of the covariance is the number of dimensions
    that the batch uses. It needs no singular values, for which a GPU would wait.

    Args:
        views: `(M, V, D)` views of the global batch.
    """
    with torch.no_grad(), torch.autocast(views.device.type, enabled=False):
        unit = F.normalize(views[:_SPREAD_ROWS, 0].detach().float(), dim=-1)
        number = len(unit)
        centred = unit - unit.mean(dim=0)
        # exp(-2 |x - y|^2) of unit vectors; it is 1 for each row with itself
        pairs = (4 * (unit @ unit.T) - 4).exp().sum() - number
        uniformity = (pairs / (number * (number - 1) or torch.nan)).log()
        gram = centred @ centred.T
        ratio = gram.diagonal().sum().square() / gram.square().sum()
        return torch.stack([uniformity, ratio]).double()
