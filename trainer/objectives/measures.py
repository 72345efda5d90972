"""Measures of embeddings: retrieval of pairs, alignment, uniformity, effective rank.

Legend: N rows, H embedding size.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from declutr.common.seeding import U64
from declutr.trainer.objectives.row_score import RowScore


def retrieval(anchors: Tensor, positives: Tensor, keys: U64) -> dict[str, float]:
    """Recall@1 and mean reciprocal rank of each anchor's positive among all N positives, by cosine; scores of rows.

    Ties count against the encoder, so that equal embeddings do not look perfect.

    Args:
        anchors: `(N, H)`.
        positives: `(N, H)`.
        keys: `(N,)` keys of the rows.
    """
    scores = F.normalize(anchors, dim=-1) @ F.normalize(positives, dim=-1).T
    ranks = (scores >= scores.diagonal()[:, None]).sum(dim=1).double().numpy()
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
