"""Rows of sentences, pairs and triples as lines of text."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from declutr.common.excerpt import shorten
from declutr.inspection.decoding import decoder
from declutr.pipeline.shards.content import LABELS
from declutr.pipeline.shards.shards import ShardSet

_SHOWN_CHARACTERS = 160


def text_lines(path: Path, shards: ShardSet, rows: Sequence[int]) -> Iterator[str]:
    """Show rows of shards by number, each text with its label and its number of tokens."""
    decode = decoder(path)
    kind = shards.manifest.content.kind
    for number, row in zip(rows, shards.take(np.array(rows, np.int64)).to_pylist(), strict=True):
        yield f"- row {number} ({row['id'].hex()}, {row['source']}): {row['num_tokens']:,} tokens"
        ends = [*row["starts"][1:], row["num_tokens"]]
        for start, end, label in zip(row["starts"], ends, row["labels"], strict=True):
            name = LABELS[label] if label >= 0 else "sentence" if kind == "sentences" else "premise"
            text = shorten(decode(row["tokens"][start:end]), _SHOWN_CHARACTERS)
            yield f"    {name:13s} {end - start:4d} tokens  {text}"
