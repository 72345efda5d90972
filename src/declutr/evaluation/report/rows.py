"""Figures of rows of short texts, images and clips, and thumbnails, read from the shards."""

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
from declutr.pipeline.shards.content import LABELS, MEDIA_KINDS, AudioContent, ImagesContent
from declutr.pipeline.shards.manifest import SPLITS, Manifest, ShardError
from declutr.pipeline.shards.shards import ShardSet

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


_ROWS = 10_000
_MOST_TEXT_BARS = 20


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
            found, counts = np.unique(sizes[labels == label], return_counts=True)
            known = self.lengths.setdefault(role, TextLengths()).counts
            known.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
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
    found = TextSurvey()
    for split in SPLITS:
        shards = ShardSet(folder, split)
        for first in range(0, shards.num_documents, _ROWS):
            rows = np.arange(first, min(first + _ROWS, shards.num_documents))
            found.add(shards.take(rows), "sentence" if kind == "sentences" else "premise")
    return found


def text_bars(found: TextSurvey, labels: dict[str, int]) -> list[Bars]:
    """Bar charts of lengths, of hypotheses per premise, and of labels; charts without bars included."""
    lengths = Counter[int]()
    for role in found.lengths.values():
        for length, number in role.counts.items():
            lengths[max(0, length - 1).bit_length()] += number
    texts, rows = lengths.total(), found.hypotheses.total()
    by_length = [_bar(_band(octave), lengths[octave], texts) for octave in sorted(lengths)]
    numbers = sorted(found.hypotheses)[:_MOST_TEXT_BARS] if labels else []
    by_number = [_bar(f"{number} hypotheses", found.hypotheses[number], rows) for number in numbers]
    by_label = [_bar(label, number, sum(labels.values())) for label, number in labels.items()]
    return [
        Bars("texts", "Texts by length in tokens", by_length),
        Bars("hypotheses", "Premises by number of hypotheses", by_number),
        Bars("labels", "Kept hypotheses by label", by_label),
    ]


def _bar(label: str, number: int, whole: int) -> Bar:
    return Bar(label, number, "kept", f"{number:,} ({share(number, whole)})")


def _band(octave: int) -> str:
    """Lengths of an octave: 1, 2, 3 to 4, 5 to 8 and so on."""
    return str(octave + 1) if octave < 2 else f"{2 ** (octave - 1) + 1:,} to {2**octave:,}"


def _flat(rows: pa.Table, name: str) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Values and offsets of a list column of one chunk."""
    column = rows.column(name).chunk(0)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.flatten().to_numpy(), offsets - offsets[0]
