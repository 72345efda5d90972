"""The closed form for few documents: fitted on four fifths of them and scored on the rest, five times."""

import numpy as np

from declutr.adaptation.measures import F64, Passages
from declutr.adaptation.scores import DISTANT, Values
from declutr.adaptation.whitening import WithinSums, whitening
from declutr.evaluation.encoders.protocol import unit_rows
from declutr.evaluation.encoders.transformer import TransformerEncoder

_FOLDS = 5


def cross_fitted(
    passages: Passages, start: TransformerEncoder, power: float, shrinkage: float
) -> tuple[Values, Values]:
    """Values of the start and of the closed form, each document scored by a fit without it.

    A document's passages search among those of the documents of its fold, for both encoders.

    Args:
        passages: of all documents.
        start: the encoder.
        power: of the covariance.
        shrinkage: weight of the identity.

    Raises:
        WhiteningError: the documents of four folds have no covariance.
    """
    rows = unit_rows(start.embed_ids(passages.ids).astype(np.float64))
    before, after = (np.full(passages.num_documents, np.nan) for _ in range(2))
    fold_of = np.arange(passages.num_documents) % _FOLDS
    for fold in range(min(_FOLDS, passages.num_documents)):
        inside = fold_of[passages.owners] == fold
        matrix = whitening(WithinSums.of(rows[~inside], passages.owners[~inside]), power, shrinkage)
        mine = np.flatnonzero(fold_of == fold)
        part = _of_documents(passages, mine)
        for values, found in ((before, rows[inside]), (after, rows[inside] @ matrix)):
            unit = unit_rows(found)
            values[mine] = part.distant((unit @ unit.T).astype(np.float32))
    return {DISTANT: before}, {DISTANT: after}


def _of_documents(passages: Passages, documents: np.ndarray) -> Passages:
    """The passages of some documents, numbered from 0."""
    inside = np.isin(passages.owners, documents)
    owners = np.searchsorted(documents, passages.owners[inside])
    nothing: F64 = np.empty(0)
    return Passages([], [], owners, passages.starts[inside], [], nothing.astype(np.int64), len(documents))
