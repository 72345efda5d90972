"""Canonical microbatches: documents of the global batch whose forward is the same for any number of workers.

A batch is cut into microbatches of a fixed number of documents, counted from the start of the global batch. A worker
has whole microbatches, and each is packed alone, so that no forward depends on the number of workers.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from declutr.trainer.data.batches import AnyBatch, CanonicalMicrobatch, Collator, RankBatch


def collate_canonical(
    collator: Collator, rows: pa.Table, epochs: NDArray[np.int64], first_canonical: int, canonical_documents: int
) -> RankBatch:
    """The batch of a worker, of which each microbatch is packed alone.

    Args:
        collator: packs rows.
        rows: n rows of the shards, whole microbatches of the global batch.
        epochs: `(n,)` epoch in which each is read.
        first_canonical: number of the worker's first microbatch in the global batch.
        canonical_documents: documents of a microbatch; the last microbatch of the global batch may have fewer.
    """
    places = range(0, len(rows), canonical_documents)
    parts = [
        collator.collate(rows.slice(at, canonical_documents), epochs[at : at + canonical_documents]) for at in places
    ]
    if not parts:  # more workers than microbatches
        return collator.collate(rows, epochs)
    starts = np.cumsum([0, *(part.spans.num_spans for part in parts)])
    views = [None if part.views is None else part.views + int(at) for part, at in zip(parts, starts, strict=False)]
    return RankBatch(
        _joined([part.spans for part in parts]),
        len(rows),
        sum(part.num_rows for part in parts),
        {name: torch.cat([part.facts[name] for part in parts]) for name in parts[0].facts},
        views=_cat(views),
        canonical=tuple(
            CanonicalMicrobatch(first_canonical + number, part.num_documents, part.spans.num_spans, part.num_rows)
            for number, part in enumerate(parts)
        ),
    )


def collated(
    collator: Collator, rows: pa.Table, epochs: NDArray[np.int64], start: int, canonical_documents: int | None
) -> RankBatch:
    """The batch of a worker with its digest.

    Args:
        collator: packs rows.
        rows: n rows of the shards.
        epochs: `(n,)` epoch in which each is read.
        start: place of the first row in the global batch.
        canonical_documents: documents of a canonical microbatch; None: the batch is packed as one.
    """
    if canonical_documents is None:
        batch = collator.collate(rows, epochs)
    else:
        batch = collate_canonical(collator, rows, epochs, start // canonical_documents, canonical_documents)
    return replace(batch, digest=batch.spans.digest())


def canonical_microbatches(batch: RankBatch) -> list[RankBatch]:
    """The microbatches of a worker's batch as separate batches, without facts; a batch without microbatches is one."""
    if not batch.canonical:
        return [batch]
    bounds = np.cumsum([0, *(microbatch.num_spans for microbatch in batch.canonical)]).tolist()
    rows = np.cumsum([0, *(microbatch.num_rows for microbatch in batch.canonical)]).tolist()
    spans: list[AnyBatch] = list(batch.spans.slices(list(pairwise(bounds))))
    return [
        replace(
            batch,
            spans=part,
            num_documents=microbatch.num_documents,
            num_rows=microbatch.num_rows,
            facts={},
            views=None if batch.views is None else batch.views[row : row + microbatch.num_rows] - bound,
            canonical=(microbatch,),
        )
        for microbatch, part, bound, row in zip(batch.canonical, spans, bounds, rows, strict=False)
    ]


def _joined(parts: Sequence[AnyBatch]) -> AnyBatch:
    """The spans of several batches, one after the other."""
    tokens = np.cumsum([0, *(part.num_tokens for part in parts)]).tolist()
    values: dict[str, Any] = {field.name: [getattr(part, field.name) for part in parts] for field in fields(parts[0])}
    if "selected" in values:
        values["selected"] = [places + at for places, at in zip(values["selected"], tokens, strict=False)]
    joined: dict[str, Any] = {name: _cat(tensors) for name, tensors in values.items()}
    return type(parts[0])(**joined)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors one after the other; None if they are missing."""
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None
