"""Figures of rows of short texts, and thumbnails of images and clips, read from the shards."""

import base64
from collections import Counter
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.media.images import PILLOW_ERRORS
from declutr.pipeline.shards.content import LABELS, MEDIA_KINDS
from declutr.pipeline.shards.manifest import SPLITS, Manifest
from declutr.pipeline.shards.shards import ShardSet

THUMBNAIL_PIXELS = 96
"""Longest side of a thumbnail."""
_ROWS = 10_000


def thumbnail(row: dict[str, Any]) -> str | None:
    """A small PNG of a row as a data URI: the image, or the energies of a clip; None if it cannot be decoded.

    It is encoded again from pixels, so no byte of the corpus reaches the browser.
    """
    from PIL import Image  # imported here because reports of texts do not need it

    try:
        if "image" in row:
            with Image.open(BytesIO(row["image"]), formats=["PNG"]) as opened:
                picture = opened.convert("RGB")
            picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        else:
            frames = np.asarray(row["frames"], np.float64).reshape(row["num_frames"], -1)
            picture = Image.fromarray(_grey(frames)).resize((2 * THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        encoded = BytesIO()
        Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(encoded, "PNG")
    except (Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def _grey(frames: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Energies `(num_frames, num_mel_bins)` as an image with time to the right and low bands below."""
    low, high = float(frames.min()), float(frames.max())
    scaled = (frames - low) / max(high - low, 1e-9) * 255
    return np.ascontiguousarray(scaled.T[::-1].astype(np.uint8))


@dataclass
class TextLengths:
    """Numbers of texts of one role by length in tokens."""

    counts: Counter[int] = field(default_factory=Counter)

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return self.counts.total()

    @property
    def mean(self) -> float:
        """Mean length."""
        return sum(length * number for length, number in self.counts.items()) / max(1, self.num_texts)

    def quantile(self, part: float) -> int:
        """Smallest length that at least this share of the texts does not exceed."""
        lengths = sorted(self.counts)
        sums = np.cumsum([self.counts[length] for length in lengths])
        return lengths[int(np.searchsorted(sums, part * sums[-1]))]


@dataclass
class TextSurvey:
    """Figures of all rows of a folder. Made by `survey_texts`."""

    lengths: dict[str, TextLengths] = field(default_factory=dict)
    """By role: sentence, premise, or the label of a hypothesis."""
    hypotheses: Counter[int] = field(default_factory=Counter)
    """Rows by number of hypotheses."""

    def add(self, rows: pa.Table, first_role: str) -> None:
        """Adds rows of a shard; the first text of each has this role."""
        starts, offsets = _flat(rows, "starts")
        labels, _ = _flat(rows, "labels")
        ends = np.append(starts[1:], 0)
        ends[offsets[1:] - 1] = rows.column("num_tokens").to_numpy()
        sizes = ends - starts
        for label in np.unique(labels).tolist():
            role = first_role if label < 0 else LABELS[label]
            values, counts = np.unique(sizes[labels == label], return_counts=True)
            self.lengths.setdefault(role, TextLengths()).counts.update(
                dict(zip(values.tolist(), counts.tolist(), strict=True))
            )
        numbers, counts = np.unique(np.diff(offsets) - 1, return_counts=True)
        self.hypotheses.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


def survey_texts(folder: Path, manifest: Manifest) -> TextSurvey | None:
    """Reads the rows of all shards; None if they hold documents, images or audio.

    Raises:
        ShardError: a shard differs from the manifest.
    """
    kind = manifest.content.kind
    if kind == "documents" or kind in MEDIA_KINDS:
        return None
    survey = TextSurvey()
    for split in SPLITS:
        shards = ShardSet(folder, split)
        for first in range(0, shards.num_documents, _ROWS):
            rows = np.arange(first, min(first + _ROWS, shards.num_documents))
            survey.add(shards.take(rows), "sentence" if kind == "sentences" else "premise")
    return survey


def _flat(rows: pa.Table, name: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and offsets of a list column of one chunk."""
    column = rows.column(name).chunk(0)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(), offsets - offsets[0]
