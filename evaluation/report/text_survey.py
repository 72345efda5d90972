"""Figures of rows of short texts, read from the shards: lengths by role, hypotheses per premise, labels."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.evaluation.report.charts import Bar, Bars
from declutr.evaluation.report.markup import share
from declutr.pipeline.shards.content import LABELS, MEDIA_KINDS
from declutr.pipeline.shards.manifest import SPLITS, Manifest
from declutr.pipeline.shards.shards import ShardSet

_ROWS = 10_000
_MOST_BARS = 20


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
    numbers = sorted(found.hypotheses)[:_MOST_BARS] if labels else []
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
