"""Figures and thumbnails of images and clips, read from the shards."""

import base64
from collections import Counter
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.evaluation.report.charts import Bar, Bars
from declutr.evaluation.report.markup import share
from declutr.pipeline.media.images import PILLOW_ERRORS
from declutr.pipeline.shards.content import AudioContent, ImagesContent
from declutr.pipeline.shards.manifest import Manifest, ShardError

THUMBNAIL_PIXELS = 96
"""Longest side of a thumbnail."""
_MOST_BARS = 20
_MOST_SIZES = 100_000


@dataclass
class MediaSurvey:
    """Sizes of all kept images. Made by `survey_media`."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Images by width and height; empty for clips."""
    longest_frames: int = 0
    """Frames of the longest clip; 0 for images."""
    seconds: float = 0.0
    """Duration of all clips, seconds."""


def survey_media(folder: Path, manifest: Manifest) -> MediaSurvey | None:
    """Reads the sizes of all rows, without their pixels or frames; None if they are texts.

    Raises:
        ShardError: a shard is damaged.
    """
    content = manifest.content
    if not isinstance(content, ImagesContent | AudioContent):
        return None
    found = MediaSurvey()
    names = ["width", "height"] if isinstance(content, ImagesContent) else ["num_frames"]
    for shard in manifest.shards:
        for columns in _numbers(folder / shard.name, names):
            if isinstance(content, AudioContent):
                lengths = columns[0].astype(np.float64)
                found.longest_frames = max(found.longest_frames, int(lengths.max(initial=0)))
                found.seconds += float(((lengths - 1) * content.hop_length_ms + content.frame_ms).sum()) / 1000
                continue
            pairs, counts = np.unique(np.stack(columns), axis=1, return_counts=True)
            found.sizes.update(dict(zip(zip(*pairs.tolist(), strict=True), counts.tolist(), strict=True)))
            if len(found.sizes) > _MOST_SIZES:
                found.sizes = Counter(dict(found.sizes.most_common(_MOST_SIZES // 2)))
    return found


def _numbers(path: Path, names: list[str]) -> Any:
    """Columns of numbers of each record batch of a shard; other columns are not read."""
    try:
        with pa.memory_map(str(path)) as file:
            schema = pa.ipc.open_file(file).schema
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in names])
            reader = pa.ipc.open_file(file, options=options)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                batch.validate(full=True)
                yield [batch.column(name).to_numpy() for name in names]
    except (pa.ArrowException, OSError) as error:
        raise ShardError(f"{path}: {error}; delete it and prepare again") from error


def media_bars(found: MediaSurvey, manifest: Manifest) -> list[Bars]:
    """Bar charts of labels, of sizes and of changes; charts without bars included."""
    kept = manifest.totals["kept"]
    return [
        Bars("labels", f"Kept {manifest.noun} by label", _ranked(Counter(manifest.labels), kept)),
        Bars("sizes", "Images by size in pixels", _ranked(Counter(_named(found.sizes)), kept)),
        Bars("notes", f"Kept {manifest.noun} that were changed", _ranked(Counter(manifest.notes), kept)),
    ]


def _named(sizes: Counter[tuple[int, int]]) -> dict[str, int]:
    return {f"{width} x {height}": number for (width, height), number in sizes.items()}


def _ranked(counts: Counter[str], whole: int) -> list[Bar]:
    """The most frequent names, and all others as one bar."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown, others = ranked[:_MOST_BARS], ranked[_MOST_BARS:]
    if others:
        shown.append((f"({len(others):,} others)", sum(number for _, number in others)))
    return [Bar(name, number, "kept", f"{number:,} ({share(number, whole)})") for name, number in shown]


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
        held = BytesIO()
        Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(held, "PNG")
    except (Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"


def _grey(frames: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Energies `(num_frames, num_mel_bins)` as an image with time to the right and low bands below."""
    low, high = float(frames.min()), float(frames.max())
    scaled = (frames - low) / max(high - low, 1e-9) * 255
    return np.ascontiguousarray(scaled.T[::-1].astype(np.uint8))
