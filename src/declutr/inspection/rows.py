"""Rows of documents, sentences, pairs, triples, images and clips as lines of text."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from declutr.common.console.terminal import shorten
from declutr.pipeline.shards.content import LABELS
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.shards.shards import ShardSet

_SHOWN_CHARACTERS, _SHOWN_OF_LABEL = 160, 80
_FILE = "tokenizer.json"


def text_lines(path: Path, shards: ShardSet, rows: Sequence[int]) -> Iterator[str]:
    """Show rows of shards by number: the beginning of a document, or each text with its label and number of tokens."""
    decode = decoder(path)
    kind = shards.manifest.content.kind
    for number, row in zip(rows, shards.take(np.array(rows, np.int64)).to_pylist(), strict=True):
        yield f"- row {number} ({row['id'].hex()}, {row['source']}): {row['num_tokens']:,} tokens"
        if kind == "documents":
            yield f"    {shorten(decode(row['tokens'][:_SHOWN_CHARACTERS]), _SHOWN_CHARACTERS)}"
            continue
        ends = [*row["starts"][1:], row["num_tokens"]]
        for start, end, label in zip(row["starts"], ends, row["labels"], strict=True):
            name = LABELS[label] if label >= 0 else "sentence" if kind == "sentences" else "premise"
            text = shorten(decode(row["tokens"][start:end]), _SHOWN_CHARACTERS)
            yield f"    {name:13s} {end - start:4d} tokens  {text}"


def decoder(shards: Path) -> Callable[[Sequence[int]], str]:
    """A function that returns the text of tokens of these shards, special tokens included.

    Without transformers, whose import takes longer than a look at shards.
    """
    file = shards / TOKENIZER / _FILE
    if not file.is_file():  # a tokenizer that is only implemented in Python
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)
        return lambda ids: str(slow.decode(ids)).strip()
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(file))
    return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False)).strip()


def media_lines(shards: ShardSet, rows: Sequence[int]) -> Iterator[str]:
    """Show rows of shards by number: size or length, label, and the range of the energies of a clip."""
    for number, row in zip(rows, shards.take(np.array(rows, np.int64)).to_pylist(), strict=True):
        yield f"- row {number} ({row['id'].hex()}, {row['source']}): {_size(row)}"
        yield f"    label {shorten(repr(row['label']), _SHOWN_OF_LABEL)}"


def _size(row: dict[str, object]) -> str:
    """Size of an image, or length of a clip."""
    image, frames = row.get("image"), row.get("frames")
    if isinstance(image, bytes):
        return f"{row['width']} x {row['height']} pixels, {len(image):,} bytes of PNG"
    energies = np.asarray(frames)
    return f"{row['num_frames']:,} frames, energies {energies.min():.1f} to {energies.max():.1f}"
