"""Rows of images and clips as lines of text."""

from collections.abc import Iterator, Sequence

import numpy as np

from declutr.common.excerpt import shorten
from declutr.pipeline.shards.shards import ShardSet

_SHOWN_CHARACTERS = 80


def media_lines(shards: ShardSet, rows: Sequence[int]) -> Iterator[str]:
    """Show rows of shards by number: size or length, label, and the range of the energies of a clip."""
    for number, row in zip(rows, shards.take(np.array(rows, np.int64)).to_pylist(), strict=True):
        yield f"- row {number} ({row['id'].hex()}, {row['source']}): {_size(row)}"
        yield f"    label {shorten(repr(row['label']), _SHOWN_CHARACTERS)}"


def _size(row: dict[str, object]) -> str:
    """Size of an image, or length of a clip."""
    image, frames = row.get("image"), row.get("frames")
    if isinstance(image, bytes):
        return f"{row['width']} x {row['height']} pixels, {len(image):,} bytes of PNG"
    energies = np.asarray(frames)
    return f"{row['num_frames']:,} frames, energies {energies.min():.1f} to {energies.max():.1f}"
