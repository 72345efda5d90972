"""Detection of collapsed encoders: nearly equal embeddings score near chance, and tables do not show the cause.

Legend: N embeddings of a sample, D their size.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.trainer.objectives.measures import effective_rank

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
