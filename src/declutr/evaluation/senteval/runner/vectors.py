"""Embeddings of a list of sentences on disk, in parts that are complete or absent, so that a kill loses one part.

A folder belongs to one encoder (by fingerprint) and one list of sentences (by hash). A part is a `.npy` file of at most
16,384 rows, read without unpickling.

Legend: N sentences, D embedding size.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.console.terminal import duration
from declutr.common.errors import EncoderError
from declutr.common.storage import atomic_file
from declutr.encoders.protocol import SentenceEncoder, vectors_fingerprint

PART_ROWS = 16_384


@dataclass(frozen=True)
class Vectors:
    """`(N, D)` float32 embeddings in parts of `part_rows` rows, the last of fewer."""

    folder: Path
    num_rows: int
    size: int
    part_rows: int = PART_ROWS

    def take(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows `(len(rows), D)` in the given order; opens only the parts that hold them."""
        result = np.empty((len(rows), self.size), np.float32)
        parts = rows // self.part_rows
        for part in np.unique(parts):
            here = np.flatnonzero(parts == part)
            stored = np.load(self.path(int(part)), mmap_mode="r", allow_pickle=False)
            result[here] = stored[rows[here] - part * self.part_rows]
        return result

    def path(self, part: int) -> Path:
        """Path of a part."""
        return self.folder / f"part-{part:05d}.npy"

    def there(self, part: int) -> bool:
        """Return whether a part exists with the expected shape and type."""
        path = self.path(part)
        if not path.is_file():
            return False
        rows = min(self.part_rows, self.num_rows - part * self.part_rows)
        try:
            stored = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError):
            return False
        return bool(stored.shape == (rows, self.size) and stored.dtype == np.float32)


def texts_hash(texts: Sequence[str]) -> str:
    """SHA-256 of a list of sentences, in hexadecimal."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def parts_folder(cache: Path, fingerprint: str, texts: Sequence[str], part_rows: int = PART_ROWS) -> Path:
    """Folder of an encoder's embedding parts for these texts."""
    return cache / fingerprint[:16] / f"{texts_hash(texts)[:16]}-{part_rows}"


def embed_all(
    encoder: SentenceEncoder, texts: Sequence[str], cache: Path, say: Callable[[str], None], part_rows: int = PART_ROWS
) -> Vectors:
    """Embed N different texts; reuse the parts of an earlier call in a subfolder of `cache`.

    Raises:
        EncoderError: embeddings have a shape other than `(N, encoder.size)`, or a value is not finite.
    """
    folder = parts_folder(cache, vectors_fingerprint(encoder), texts, part_rows)
    vectors = Vectors(folder, len(texts), encoder.size, part_rows)
    numbers = range(-(-len(texts) // part_rows))
    missing = [part for part in numbers if not vectors.there(part)]
    if len(missing) < len(numbers):
        say(f"{encoder.name}: reusing {len(numbers) - len(missing)} of {len(numbers)} embedding parts")
    started = time.monotonic()
    for done, part in enumerate(missing, start=1):
        own = texts[part * part_rows : (part + 1) * part_rows]
        rows = np.ascontiguousarray(encoder.encode(own), np.float32)
        if rows.shape != (len(own), encoder.size):
            raise EncoderError(f"{encoder.name}: embeddings are {rows.shape}, expected {(len(own), encoder.size)}")
        wrong = int((~np.isfinite(rows)).any(axis=1).sum())
        if wrong:
            raise EncoderError(
                f"{encoder.name}: {wrong:,} of {len(own):,} embeddings have values that are not finite; no score"
            )
        with atomic_file(vectors.path(part)) as aside, aside.open("wb") as stream:
            np.save(stream, rows)
        more = time_left(started, done, len(missing))
        say(f"{encoder.name}: embedded {min((part + 1) * part_rows, len(texts)):,} of {len(texts):,} sentences{more}")
    return vectors


def time_left(started: float, done: float, total: float) -> str:
    """Format the expected remaining time, `, about 3 min left`; "" below one second.

    `started` is on the monotonic clock; `done` and `total` are work in one unit.
    """
    left = (time.monotonic() - started) * (total - done) / done
    return f", about {duration(left)} left" if left >= 1 else ""
