"""Passages of prepared documents: windows spread evenly over each, as token ids."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.shards.shards import ragged
from declutr.trainer.data.packing import Vocabulary


def passages(
    documents: pa.Table, count: int, max_content: int, vocabulary: Vocabulary
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Token ids of at most `count` passages of each document, and the number of the document of each.

    A passage is the beginning of a window (pipeline/shards/windows.py), so passages do not overlap.

    Args:
        documents: n rows of the shards.
        count: passages of a document; a document with fewer windows has one for each.
        max_content: most tokens of a passage without special ones.
        vocabulary: ids of the tokenizer.

    Returns:
        The ids with special tokens, and `(S,)` document numbers from 0 to n - 1.
    """
    tokens, offsets = ragged(documents.column("tokens"))
    windows, bounds = ragged(documents.column("windows"))
    before = [] if vocabulary.bos is None else [vocabulary.bos]
    after = [] if vocabulary.eos is None else [vocabulary.eos]
    rows: list[list[int]] = []
    owners: list[int] = []
    for document in range(len(documents)):
        starts = windows[bounds[document] : bounds[document + 1]].astype(np.int64)
        length = min(int(starts[1] - starts[0]), max_content)
        chosen = starts[np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(np.int64)]
        for start in (offsets[document] + chosen).tolist():
            rows.append([*before, *tokens[start : start + length].tolist(), *after])
            owners.append(document)
    return rows, np.array(owners, np.int64)
