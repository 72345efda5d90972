"""Whitening by the covariance within documents (WCCN of speaker recognition, Hatch et al. 2006). NumPy only.

Directions in which the spans of one document differ from each other are shrunk, so that what they share counts more. It
is DeCLUTR's signal without training: spans of a document belong together. Legend: S spans, D embedding size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.encoders.protocol import unit_rows

F64 = NDArray[np.float64]


class WhiteningError(ValueError):
    """Spans from which no whitening can be computed."""


@dataclass(frozen=True)
class WithinSums:
    """Sums over documents from which the whitening follows; those of several blocks of documents add up.

    Attributes:
        scatter: `(D, D)` sum over spans of (e - m)(e - m)^T, with m the mean of the span's document.
        total: `(D,)` sum of the embeddings.
        spans: number of spans.
        documents: number of documents.
    """

    scatter: F64
    total: F64
    spans: int
    documents: int

    @staticmethod
    def of(embeddings: NDArray[np.floating], owners: NDArray[np.int64]) -> "WithinSums":
        """The sums of one block; embeddings are scaled to length 1 first.

        Args:
            embeddings: `(S, D)` embeddings of spans.
            owners: `(S,)` number of the document of each span, within the block.
        """
        unit = unit_rows(embeddings.astype(np.float64))
        _, rows, counts = np.unique(owners, return_inverse=True, return_counts=True)
        means = np.zeros((len(counts), unit.shape[1]))
        np.add.at(means, rows, unit)
        apart = unit - (means / counts[:, None])[rows]
        return WithinSums(apart.T @ apart, unit.sum(axis=0), len(unit), len(counts))

    def __add__(self, other: "WithinSums") -> "WithinSums":
        return WithinSums(
            self.scatter + other.scatter,
            self.total + other.total,
            self.spans + other.spans,
            self.documents + other.documents,
        )


def whitening(sums: WithinSums, power: float, shrinkage: float) -> F64:
    """`(D, D)` symmetric matrix W = C^-power, to be applied to unit embeddings.

    C is the covariance within documents, scatter / (S - documents), shrunk to the identity and scaled to a mean
    eigenvalue of 1: C = (S / mean + shrinkage * I) / (1 + shrinkage). With a shrinkage above 0 it is invertible for any
    number of documents, also for fewer than D.

    Args:
        sums: of all documents.
        power: 0 changes nothing, 0.5 whitens completely.
        shrinkage: weight of the identity.

    Raises:
        WhiteningError: no document has two spans, or the spans of each document have the same embedding.
    """
    degrees = sums.spans - sums.documents
    if degrees < 1:
        raise WhiteningError(
            f"{sums.documents:,} documents with one span each: the covariance within documents needs two spans of a "
            "document; use longer documents or shorter spans"
        )
    values, vectors = np.linalg.eigh(sums.scatter / degrees)
    mean = float(values.mean())
    if not mean > 1e-12:
        raise WhiteningError(
            f"the {sums.spans:,} spans of {sums.documents:,} documents have the same embedding as the others of their "
            "document: there is nothing to whiten; check that the documents are not empty or repeated text"
        )
    shrunk = (np.maximum(values, 0.0) / mean + shrinkage) / (1 + shrinkage)
    matrix: F64 = (vectors * shrunk**-power) @ vectors.T
    return matrix
