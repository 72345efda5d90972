"""Example documents of a prepared corpus: some kept ones, and some for each reason for which documents are not kept."""

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.inspection.describe import decoder
from declutr.pipeline.media.images import PILLOW_ERRORS
from declutr.pipeline.shards.content import LABELS
from declutr.pipeline.shards.ledger import REJECTED, Entry
from declutr.pipeline.shards.lookup import entries_at
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.shards.shards import ShardSet
from declutr.report.survey import Survey

SHOWN_CHARACTERS = 600
_KEPT_EXAMPLES = 4
_KEPT_PICTURES = 24
THUMBNAIL_PIXELS = 96
"""Longest side of a thumbnail."""
_TOKENS_READ = 1_000
"""More than 600 characters in any language, and bounded whatever the length of the document."""


@dataclass(frozen=True, slots=True)
class Example:
    """The beginning of a document and its facts. `text` is None where it was not written."""

    source: str
    offset: int
    num_tokens: int | None
    text_bytes: int | None
    detail: str | None
    text: str | None
    picture: str | None = None
    """Thumbnail of an image or clip as a data URI; None for texts."""


def kept_examples(folder: Path, manifest: Manifest) -> list[Example]:
    """Some rows of the training split, drawn by the corpus's seed, in corpus order; text decoded from the shards.

    Images and clips have their label as text.

    Raises:
        ShardError: a shard that is not what the manifest says.
    """
    number = manifest.totals["kept_train"]
    if not number:
        return []
    zero = np.zeros(1, np.uint64)
    media = manifest.tokenizer is None
    examples = _KEPT_PICTURES if media else _KEPT_EXAMPLES
    drawn = seeding.unit(seeding.words(int(manifest.config.get("seed", 0)), "report", zero, zero, examples))[0]
    rows = np.unique(np.floor(drawn * number).astype(np.int64))  # in corpus order, and a row once
    if media:
        return [
            Example(row["source"], row["offset"], None, None, None, row["label"], thumbnail(row))
            for row in ShardSet(folder, "train").take(rows).to_pylist()
        ]
    decode = decoder(folder)
    return [
        Example(row["source"], row["offset"], row["num_tokens"], None, None, _text(decode, row)[:SHOWN_CHARACTERS])
        for row in ShardSet(folder, "train").take(rows).to_pylist()
    ]


def _text(decode: Callable[[Sequence[int]], str], row: dict[str, Any]) -> str:
    """The beginning of a row's text; of several texts, those that begin within it, each after its label."""
    if "starts" not in row:
        return decode(row["tokens"][:_TOKENS_READ])
    bounds = pairwise([*row["starts"], row["num_tokens"]])
    texts = [decode(row["tokens"][start:end]) for start, end in bounds if start < _TOKENS_READ]
    labels = [f"{LABELS[label]}: " if label >= 0 else "" for label in row["labels"][: len(texts)]]
    return "\n".join(label + text for label, text in zip(labels, texts, strict=True))


def thumbnail(row: dict[str, Any]) -> str | None:
    """A small PNG of a row as a data URI: the image, or the energies of a clip; None if it cannot be decoded.

    It is encoded again from pixels, so no byte of the corpus reaches the browser.
    """
    from PIL import Image  # imported here because reports of texts do not need it

    try:
        if "image" in row:
            with Image.open(BytesIO(row["image"]), formats=["PNG"]) as opened:  # no other decoder sees these bytes
                picture = opened.convert("RGB")
            picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        else:
            frames = np.asarray(row["frames"], np.float64).reshape(row["num_frames"], -1)
            picture = Image.fromarray(_grey(frames)).resize((2 * THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
        encoded = BytesIO()
        Image.frombytes(picture.mode, picture.size, picture.tobytes()).save(encoded, "PNG")  # pixels alone, no metadata
    except (Image.DecompressionBombError, *PILLOW_ERRORS):
        return None
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def _grey(frames: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Energies `(num_frames, num_mel_bins)` as an image with time to the right and low bands below."""
    low, high = float(frames.min()), float(frames.max())
    scaled = (frames - low) / max(high - low, 1e-9) * 255  # energies may be equal
    return np.ascontiguousarray(scaled.T[::-1].astype(np.uint8))


def rejected_examples(folder: Path, survey: Survey) -> dict[str, list[Example]]:
    """The documents that the survey drew for each reason; with text where `write_rejected` was on."""
    places = {reason: sorted(row[1:] for row in rows) for reason, rows in survey.drawn.items()}
    entries = entries_at(folder, (place for rows in places.values() for place in rows))
    texts = _rejected_texts(folder, entries)

    def example(place: tuple[int, int]) -> Example:
        entry = entries[place]
        text = texts.get(place)
        return Example(entry.source, entry.offset, entry.num_tokens, entry.text_bytes, entry.detail, text)

    return {reason: [example(place) for place in rows] for reason, rows in places.items()}


def _rejected_texts(folder: Path, entries: Mapping[tuple[int, int], Entry]) -> dict[tuple[int, int], str]:
    """Reads the first characters of rejected documents; units without a file are left out."""
    texts, places_of = {}, defaultdict[int, dict[tuple[str, int], tuple[int, int]]](dict)
    for place, entry in entries.items():
        places_of[place[0]][entry.source, entry.offset] = place
    for unit, places in places_of.items():
        path = folder / REJECTED / f"{unit:05d}.jsonl.gz"
        if path.exists():  # without `write_rejected` there is none
            with gzip.open(path, "rb") as stream:
                for row in map(json.loads, stream):
                    if drawn := places.get((row["source"], row["offset"])):
                        texts[drawn] = row["text"][:SHOWN_CHARACTERS]
    return texts
