"""Rows of images and audio in shards: their columns, their values, and checks of what the columns say."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.pipeline.shards.content import MediaKind

PNG = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 24  # bytes of a PNG up to and with the width and the height
# Most pixels of an image, claimed or real: Pillow's limit, above which it warns of a decompression bomb.
MAX_PIXELS = 89_478_485


class Image(msgspec.Struct, frozen=True, tag=True):
    """A stored image."""

    png: bytes  # the image as PNG; RGB, 8 bits a channel
    width: int  # pixels
    height: int  # pixels
    label: str  # its label; "" without labels

    @property
    def size(self) -> int:
        """Pixels."""
        return self.width * self.height

    @property
    def num_bytes(self) -> int:
        """Bytes in a shard."""
        return len(self.png)


class Clip(msgspec.Struct, frozen=True, tag=True):
    """A stored clip."""

    frames: NDArray[np.float32]  # `(num_frames, num_mel_bins)` float32 log-mel energies
    label: str  # its label; "" without labels

    @property
    def size(self) -> int:
        """Frames."""
        return len(self.frames)

    @property
    def num_bytes(self) -> int:
        """Bytes in a shard."""
        return int(self.frames.nbytes)


Media = Image | Clip


def media_arrays(rows: Sequence[Media]) -> dict[str, Any]:
    """Columns of rows of one kind: those of `MEDIA_COLUMNS` and `label`."""
    columns: dict[str, Any] = {"label": [row.label for row in rows]}
    images = [row for row in rows if isinstance(row, Image)]
    if images:
        return columns | {
            "image": [row.png for row in images],
            "width": [row.width for row in images],
            "height": [row.height for row in images],
        }
    clips = [row.frames for row in rows if isinstance(row, Clip)]
    offsets = np.cumsum([0, *(frames.size for frames in clips)]).astype(np.int32)
    values = pa.array(np.concatenate([frames.reshape(-1) for frames in clips]))
    return columns | {
        "frames": pa.ListArray.from_arrays(pa.array(offsets), values),
        "num_frames": [len(frames) for frames in clips],
    }


def media_rows(batch: pa.RecordBatch) -> Iterator[Media]:
    """The rows of a record batch that `media_arrays` made."""
    labels = batch.column("label").to_pylist()
    if "image" in batch.schema.names:
        columns = (batch.column(name).to_pylist() for name in ("image", "width", "height"))
        for png, width, height, label in zip(*columns, labels, strict=True):
            yield Image(png, width, height, label)
        return
    for frames, num_frames, label in zip(
        lists(batch.column("frames")), batch.column("num_frames"), labels, strict=True
    ):
        yield Clip(frames.reshape(num_frames.as_py(), -1), label)


def lists(column: pa.Array) -> Iterator[NDArray[Any]]:
    """The lists of a column."""
    # Not `flatten`: offsets count from the first value.
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy()
    for start, stop in pairwise(offsets.tolist()):
        yield values[start:stop]


def media_problem(
    batch: pa.RecordBatch,  # rows of a shard without a `memory_problem`
    kind: MediaKind,  # kind of rows in the manifest
    num_mel_bins: int,  # bands of a frame in the manifest
) -> tuple[int, str] | None:
    """The first row whose columns contradict each other, and its problem; None if all rows agree."""
    if not len(batch):
        return None
    return _images_problem(batch) if kind == "images" else _audio_problem(batch, num_mel_bins)


def _images_problem(batch: pa.RecordBatch) -> tuple[int, str] | None:
    """A wrong size, or a PNG whose header gives another size than the columns."""
    width, height = (batch.column(name).to_numpy().astype(np.int64) for name in ("width", "height"))
    wrong = (width < 1) | (height < 1) | (width * height > MAX_PIXELS)
    if wrong.any():
        row = int(wrong.argmax())
        return row, (
            f"the image has {width[row]} x {height[row]} pixels; at least 1 x 1 and at most {MAX_PIXELS} together are "
            "possible"
        )
    for row, image in enumerate(batch.column("image")):
        head = image.as_buffer()[:_HEADER_BYTES].to_pybytes()
        # IHDR comes first, and begins with them.
        sizes = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
        if not head.startswith(PNG) or sizes != (width[row], height[row]):
            return row, f"its image is no PNG of {width[row]} x {height[row]} pixels"
    return None


def _audio_problem(batch: pa.RecordBatch, num_mel_bins: int) -> tuple[int, str] | None:
    """A wrong number of frames or energies, or an energy that is not finite."""
    column = batch.column("frames")
    lengths = np.diff(column.offsets.to_numpy().astype(np.int64))
    counted = batch.column("num_frames").to_numpy().astype(np.int64)
    wrong = (counted < 1) | (counted * num_mel_bins != lengths)
    if wrong.any():
        row = int(wrong.argmax())
        return row, (
            f"num_frames = {counted[row]}, and {lengths[row]} energies, with {num_mel_bins} bands a frame in the "
            "manifest"
        )
    if not (finite := np.isfinite(column.flatten().to_numpy())).all():
        # "right", as a row ends before its sum.
        row = int(np.searchsorted(np.cumsum(lengths), int((~finite).argmax()), side="right"))
        return row, "it has energies that are not finite"
    return None
