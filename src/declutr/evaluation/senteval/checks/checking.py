"""Checks that data are the published set: bytes, rows, classes, labels, sentences, encoding, duplicates."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from declutr.common.console.terminal import excerpt
from declutr.evaluation.senteval.checks.alterations import check_rows
from declutr.evaluation.senteval.checks.published import (
    Published,
    PublishedSplit,
    digests_of,
    published,
    same_sentences,
)
from declutr.evaluation.senteval.data.loading import load
from declutr.evaluation.senteval.data.taskdata import (
    DataError,
    DataFinding,
    Inspection,
    MissingDataError,
    Split,
    TaskData,
)
from declutr.evaluation.senteval.data.tasks import SentEvalTask

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


_MAX_IMBALANCE = 1.5  # "balanced across the target classes", says the README of the probing data

UNCHECKED = "--allow-unchecked scores your own data; such scores are marked as not comparable with published ones"


def inspect(task: SentEvalTask, folder: Path, allow_unchecked: bool = False) -> Inspection:
    """Load and check a task from a folder with `downstream` and `probing`; never raises for errors in the data.

    `allow_unchecked` gives data other than the published ones the standing "unpublished" instead of "refused". Data
    that cannot be read are refused in any case.
    """
    try:
        data = load(task, folder)
    except MissingDataError as error:
        return Inspection(task, "missing", (DataFinding("refuse", str(error)),))
    except DataError as error:
        return Inspection(task, "refused", (DataFinding("refuse", str(error), error.faked),))
    findings, same_rows = _examine(data)
    if any(finding.level == "refuse" for finding in findings):
        return Inspection(task, "unpublished" if allow_unchecked else "refused", findings, data)
    if _identical(data, published()[task.name]):
        return Inspection(task, "identical", findings, data)
    return Inspection(task, "published" if same_rows else "altered", findings, data)


def _examine(data: TaskData) -> tuple[tuple[DataFinding, ...], bool]:
    """Return all findings, worst first, and whether every row, scored or not, is known to be the published one."""
    figures = published()[data.task.name]
    findings, same_rows = list(_swapped(data)), True
    if not _identical(data, figures):
        others = list(_counts(data, figures)) or list(
            check_rows(data, figures, _majority(data) if data.classes else "")
        )
        findings += [*_bytes(data, figures), *others]
        same_rows = not others
        known = {name: expected.digests for name, expected in figures.splits.items()}
        if not all(same_sentences(digests_of(data, data.splits[name]), known[name]) for name in known):
            findings += check_encoding(data, figures)
    findings += check_duplicates(data)
    if data.num_empty:
        findings.append(DataFinding("info", f"{data.num_empty} lines have no word; a full stop is embedded for them"))
    findings += [DataFinding("warn", note) for note in data.notes]
    levels = ("refuse", "warn", "info")
    return tuple(sorted(findings, key=lambda finding: levels.index(finding.level))), same_rows


def _bytes(data: TaskData, figures: Published) -> Iterator[DataFinding]:
    """Report files that are not the published ones, whatever the difference."""
    if not figures.files:
        yield DataFinding("warn", f"{data.task.label}: files cannot be compared: no published hash is known here")
        return
    other = [name.rpartition("/")[2] for name, digest in figures.files.items() if data.files[name] != digest]
    yield DataFinding("warn", f"{len(other)} of {len(figures.files)} files differ from the published ones: "
                  f"{excerpt(other)}")  # fmt: skip


def _identical(data: TaskData, figures: Published) -> bool:
    return bool(figures.files) and dict(data.files) == dict(figures.files)


def _swapped(data: TaskData) -> Iterator[DataFinding]:
    """Report files with the content of another published file."""
    owners = {digest: name for figures in published().values() for name, digest in figures.files.items()}
    for name, digest in data.files.items():
        owner = owners.get(digest, name)
        if owner != name:
            yield DataFinding(
                "refuse",
                f"{name} has the content of {owner}: files are swapped or copied over each other",
                "rows would be scored against the labels of other rows",
            )


def _counts(data: TaskData, figures: Published) -> Iterator[DataFinding]:
    for name, expected in figures.splits.items():
        split = data.splits[name]
        where = f"{data.task.label} {name}" if len(figures.splits) > 1 else data.task.label
        classes = _class_counts(data, split)
        if expected.classes and classes != dict(expected.classes):
            told = ", ".join(
                f"{classes.get(key, 0):,} {key} (published {number:,})" for key, number in expected.classes.items()
            )
            yield DataFinding(
                "refuse", f"{where}: {len(split):,} rows, published {expected.rows:,}: {told}", _majority(data)
            )
        elif abs(len(split) - expected.rows) > expected.tolerance:
            about = "about " if expected.tolerance else ""
            whole = f"{where}: {len(split):,} rows, published {about}{expected.rows:,}"
            yield DataFinding("refuse", whole, _majority(data) if data.classes else _fewer(data, split, expected))
        elif split.num_unscored != expected.unscored:
            yield DataFinding(
                "refuse", f"{where}: {split.num_unscored:,} rows without a score, published {expected.unscored:,}"
            )
    if data.classes and len(data.classes) != figures.num_classes:
        yield DataFinding("refuse", f"{data.task.label}: {len(data.classes)} classes, published {figures.num_classes}")
    elif figures.class_names and set(data.classes) != set(figures.class_names):
        told = f"{', '.join(data.classes)}, published {', '.join(figures.class_names)}"
        yield DataFinding("refuse", f"{data.task.label}: class names are {told}")
    elif figures.basis == "probing":
        counts = _class_counts(data, data.splits["train"])
        largest = max(counts.values())
        if largest * len(counts) > _MAX_IMBALANCE * sum(counts.values()):
            yield DataFinding(
                "refuse", f"{data.task.label}: classes are not balanced, unlike the published ones", _majority(data)
            )


def _class_counts(data: TaskData, split: Split) -> dict[str, int]:
    counts = Counter(split.labels.tolist()) if data.classes else Counter()
    return {name: counts[number] for number, name in enumerate(data.classes)}


def _majority(data: TaskData) -> str:
    """Score of a classifier that has learned nothing, on the scored rows."""
    split = data.splits["test" if "test" in data.splits else "all"]
    if not len(split):
        return "no row would be scored"
    counts = _class_counts(data, split)
    largest = max(counts, key=lambda name: counts[name])
    share = 100 * counts[largest] / len(split)
    told = f"always answering {largest!r} is right in {counts[largest]:,} of {len(split):,} rows = {share:.2f}%"
    return f"{told}, and one row is worth {100 / len(split):.2f} points" if len(split) < 1000 else told


def _fewer(data: TaskData, split: Split, expected: PublishedSplit) -> str:
    if data.task.procedure == "retrieval":
        return "each query would have fewer candidates: higher recalls"
    error = 1 / max(1, len(split) - 3) ** 0.5
    return (
        f"a correlation over {len(split):,} of {expected.rows:,} pairs, uncertain by about {100 * error:.1f} points, "
        "would pass for the published task's"
    )
