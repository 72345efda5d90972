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

from declutr.evaluation.senteval.data.taskdata import TaskData
from declutr.trainer.objectives.measures import alignment

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
