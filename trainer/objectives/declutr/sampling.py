"""Spans of shard rows: their random draws and their places. Numpy and Arrow only."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.data.shard_columns import document_keys, ragged
from declutr.trainer.objectives.declutr.spans import Spans, draw, place
from declutr.trainer.objectives.span_config import SpanConfig


def sample_spans(
    config: SpanConfig, seed: int, short_documents: ShortDocuments, documents: pa.Table, epochs: NDArray[np.int64]
) -> Spans:
    """The spans of n shard rows in the epochs `(n,)`."""
    windows, offsets = ragged(documents.column("windows"))
    return place(
        config,
        draw(config, seed, epochs, document_keys(documents)),
        documents.column("num_tokens").to_numpy(),
        windows.astype(np.int64),
        offsets,
        short_documents,
    )
