"""The plane in which embeddings differ most: their first two principal components (Pearson, 1901).

With mean m and covariance C = 1/n sum_i (x_i - m)(x_i - m)^T, a vector x is shown at (u_1, u_2)^T (x - m), where u_1
and u_2 are the eigenvectors of C with the largest eigenvalues. The map is linear, so new vectors can be placed too.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh


@dataclass(frozen=True)
class Plane:
    """Plane through embeddings."""

    mean: NDArray[np.float64]
    """`(size,)`."""
    axes: NDArray[np.float64]
    """`(size, 2)`, of length 1; the second is null if embeddings consist of one number."""
    share: float
    """Share of the variance within the plane, in [0, 1]; 1 if there is no variance."""

    def place(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Coordinates `(n, 2)` of vectors `(n, size)`."""
        placed: NDArray[np.float64] = (vectors - self.mean) @ self.axes
        return placed


def fit_plane(vectors: NDArray[np.float32]) -> Plane:
    """Fit the plane of vectors `(n, size)`, n and size at least 1. Their order affects rounding only."""
    mean = vectors.mean(axis=0, dtype=np.float64)
    centred = vectors - mean
    covariance = centred.T @ centred / len(centred)
    size = len(covariance)
    found, columns = eigh(covariance, subset_by_index=[max(0, size - 2), size - 1])
    axes = np.zeros((size, 2))
    axes[:, : len(found)] = columns[:, ::-1]
    # The sign of an eigenvector is arbitrary: make the number of largest magnitude positive.
    axes *= np.where(np.take_along_axis(axes, np.abs(axes).argmax(axis=0)[None], axis=0) < 0, -1.0, 1.0)
    total = float(np.trace(covariance))
    return Plane(mean, axes, min(1.0, max(0.0, float(found.sum()) / total)) if total else 1.0)
