"""Checks of the sentences: characters lost or doubled by a wrong encoding, and duplicates."""

import re
from collections import Counter
from collections.abc import Iterator

from declutr.evaluation.senteval.checks.published import Published
from declutr.evaluation.senteval.data.findings import DataFinding
from declutr.evaluation.senteval.data.taskdata import Split, TaskData

# UTF-8 read as latin-1 or cp1252: a lead byte's character, then those of its continuation bytes
_LATIN1 = re.compile(
    "[\u00c2-\u00df][\u0080-\u00bf]|[\u00e0-\u00ef][\u0080-\u00bf]{2}|[\u00f0-\u00f4][\u0080-\u00bf]{3}"
)
_CP1252 = re.compile(
    "[\u00c2\u00c3\u00c5][\u00a0-\u00bf\u0152-\u0192\u02c6-\u2122]|\u00e2[\u20ac\u201a-\u2122][\u00a0-\u2122]"
)
_MAX_CONTRADICTIONS = 0.05


def check_encoding(data: TaskData, figures: Published) -> Iterator[DataFinding]:
    """Report characters that were lost (U+FFFD) or doubled (UTF-8 read as latin-1) in a conversion.

    The published files examined hold no doubled character, so a single one is refused in their tasks.
    """
    rows = list(_rows(data))
    lost = sum(row.count("\ufffd") for row in rows)
    if lost > figures.replacements:
        hit = sum("\ufffd" in row for row in rows)
        yield DataFinding(
            "refuse",
            f"{lost - figures.replacements:,} characters were lost (U+FFFD) in a conversion: latin-1 read as UTF-8",
            f"{hit:,} of {len(rows):,} rows would be scored on words other than the published ones",
        )
    doubled = [row for row in rows if _LATIN1.search(row) or _CP1252.search(row)]
    if doubled:
        example = next(
            pattern for row in doubled for pattern in [_LATIN1.search(row) or _CP1252.search(row)] if pattern
        )
        yield DataFinding(
            "refuse" if figures.basis in ("files", "snli") else "warn",
            f"{len(doubled):,} rows hold UTF-8 that was read as latin-1 ({example.group()!r}): the file's encoding "
            "is not the one SentEval reads, or the file was converted twice",
            f"{len(doubled):,} of {len(rows):,} rows would be scored on words other than the published ones",
        )


def check_duplicates(data: TaskData) -> Iterator[DataFinding]:
    """Report rows that occur twice, in one split or in two; refuse if the same row has different classes too often."""
    seen: dict[str, set[str]] = {}
    for name, split in data.splits.items():
        keys = _keys(split)
        counts = Counter(keys)
        again = len(keys) - len(counts)
        if again:
            yield DataFinding("info", f"{name}: {again:,} of {len(keys):,} rows repeat an earlier one")
        for other, theirs in seen.items():
            shared = sum(key in theirs for key in keys)
            if shared and data.task.procedure != "similarity":
                yield DataFinding("info", f"{name}: {shared:,} of {len(keys):,} rows are also in {other}")
        seen[name] = set(counts)
        if data.classes:
            yield from _contradictions(name, keys, split)


def _contradictions(name: str, keys: list[str], split: Split) -> Iterator[DataFinding]:
    labels: dict[str, set[int]] = {}
    for key, label in zip(keys, split.labels.tolist(), strict=True):
        labels.setdefault(key, set()).add(int(label))
    unlike = sum(len(labels[key]) > 1 for key in keys)
    share = unlike / max(1, len(keys))
    if share > _MAX_CONTRADICTIONS:
        yield DataFinding(
            "refuse",
            f"{name}: {unlike:,} of {len(keys):,} rows occur under two classes: a file was copied over another",
            f"no classifier could get more than about {100 * (1 - share / 2):.0f}% of them right",
        )
    elif unlike:
        yield DataFinding("info", f"{name}: {unlike:,} rows occur under two classes")


def _keys(split: Split) -> list[str]:
    if split.second is None:
        return list(split.first)
    return ["\t".join(pair) for pair in zip(split.first, split.second, strict=True)]


def _rows(data: TaskData) -> Iterator[str]:
    for split in data.splits.values():
        yield from _keys(split)
