"""Checks that data are the published set: git's hash of every file, and the number of rows.

`published.json` has both; "basis" there gives the source of its figures.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

from declutr.common.console.terminal import excerpt
from declutr.common.errors import DataError, MissingDataError
from declutr.evaluation.senteval.data.loading import load
from declutr.evaluation.senteval.data.taskdata import Inspection, TaskData
from declutr.evaluation.senteval.data.tasks import SentEvalTask

UNCHECKED = "--allow-unchecked scores your own data; such scores are marked as not comparable with published ones"
_SAID = {
    "identical": "the published files, byte for byte",
    "unverified": "no published hash is known here: scores are marked",
    "unpublished": "NOT the published set: scores are marked and not comparable",
    "refused": "REFUSED",
    "missing": "missing",
}


class Published(TypedDict):
    """Figures of one task."""

    basis: str
    """Key of "basis" in the JSON."""
    rows: Mapping[str, int]
    """Scored rows by split or subset; of the probing tasks a rounded number."""
    files: Mapping[str, str]
    """Git's SHA-1 of every file, by its path in the data folder; empty if unknown."""


@cache
def published() -> Mapping[str, Published]:
    """Figures of every task, by name."""
    tasks: Mapping[str, Published] = json.loads(files(__package__).joinpath("published.json").read_bytes())["tasks"]
    return tasks


@cache
def known_hashes() -> Mapping[str, str]:
    """Git's SHA-1 of every published file whose hash is known, by its path in the data folder."""
    return {path: digest for figures in published().values() for path, digest in figures["files"].items()}


def inspect(task: SentEvalTask, folder: Path, allow_unchecked: bool = False) -> Inspection:
    """Load and check a task from a folder with `downstream` and `probing`; never raises for errors in the data.

    `allow_unchecked` gives data other than the published ones the standing "unpublished" instead of "refused". Data
    that cannot be read are refused in any case.
    """
    try:
        data = load(task, folder)
    except MissingDataError as error:
        return Inspection(task, "missing", (str(error),))
    except DataError as error:
        return Inspection(task, "refused", (str(error),))
    figures = published()[task.name]
    if figures["files"] and dict(data.files) == dict(figures["files"]):
        return Inspection(task, "identical", data.notes, data)
    problems = [*_other_files(data, figures), *_other_rows(data, figures)]
    if not problems:
        unknown = f"{task.label}: no hash of the published files is known here; the numbers of rows match"
        return Inspection(task, "unverified", (unknown, *data.notes), data)
    return Inspection(task, "unpublished" if allow_unchecked else "refused", (*problems, *data.notes), data)


def _other_files(data: TaskData, figures: Published) -> Iterator[str]:
    """Files that are not the published ones, and those with the content of another published file."""
    owners = {digest: path for path, digest in known_hashes().items()}
    for path, digest in data.files.items():
        if (owner := owners.get(digest, path)) != path:
            yield f"{path} has the content of {owner}: files are swapped or copied over each other"
    if other := [path for path, digest in figures["files"].items() if data.files[path] != digest]:
        names = excerpt([path.rpartition("/")[2] for path in other])
        yield (
            f"{len(other)} of {len(figures['files'])} files differ from the published ones: {names}; get them again, "
            "without a change of words, line ends or encoding (`declutr evaluate --download` fetches missing files)"
        )


def _other_rows(data: TaskData, figures: Published) -> Iterator[str]:
    """Numbers of rows that are not the published ones."""
    about, per_mille = ("about ", 2) if figures["basis"] == "probing" else ("", 0)
    for name, rows in figures["rows"].items():
        if abs((count := len(data.splits[name])) - rows) > rows * per_mille / 1000:
            where = f"{data.task.label} {name}" if len(figures["rows"]) > 1 else data.task.label
            yield f"{where}: {count:,} rows, published {about}{rows:,}"


def overview(inspections: Sequence[Inspection]) -> Iterator[str]:
    """Format a line per task, what was found below it, and a summary."""
    for inspection in inspections:
        rows = f"{inspection.data.num_rows:>9,} rows" if inspection.data else " " * 14
        yield f"{inspection.task.label:9s} {rows}  {_SAID[inspection.standing]}"
        yield from (f"{'':26s}{line}" for line in inspection.findings)
    counts = Counter(inspection.standing for inspection in inspections)
    yield ", ".join(f"{number} {standing}" for standing, number in counts.items())
    if counts["refused"]:
        yield UNCHECKED
