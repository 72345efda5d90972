"""Search for misplaced files of a task: one folder too high or too deep, or names in another case."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from declutr.evaluation.senteval.data.tasks import SentEvalTask

_MAX_LISTED = 100
"""Folders per level to search."""


def where_else(task: SentEvalTask, folder: Path, names: tuple[str, ...]) -> str:
    """Advice on files of a task, named relative to the data folder, that are in another place; "" if none is nearby."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    for root in _roots(folder):
        there = {name: path for name in names if (path := _look(root, name)) is not None}
        if not there:
            continue
        name, path = next(iter(there.items()))
        below = path.relative_to(root).as_posix()
        if root == folder:
            return f"{below} was found: rename it to {name} (check the case)"
        case = "" if below == name else f", and rename {below} there to {name}"
        return f"{len(there)} of {len(names)} files are in {root / task.folder}: use --data {root}{case}"
    short = [str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in names]
    for name, full in zip(short, names, strict=True):
        if (path := _look(folder, name)) is not None:
            return f"{path} was found: move it to {folder / full}"
    for name in names:
        for root in (folder, folder / "data"):  # the folder of a repository that holds this set alone
            if (path := _look(root, PurePosixPath(name).name)) is not None:
                return f"{path} was found: move it to {folder / name}"
    return ""


def _roots(folder: Path) -> Iterator[Path]:
    """The folder, its parents and its subfolders, two levels each way."""
    yield folder
    yield from list(folder.absolute().parents)[:2]
    for first in _folders(folder):
        yield first
        yield from _folders(first)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())[:_MAX_LISTED]
    except OSError:
        return []


def _look(root: Path, name: str) -> Path | None:
    """File of that name below `root`, ignoring case, or None."""
    found = root
    for part in PurePosixPath(name).parts:
        if (found / part).exists():
            found /= part
            continue
        try:
            same = [path for path in found.iterdir() if path.name.lower() == part.lower()]
        except OSError:
            return None
        if not same:
            return None
        found = same[0]
    return found if found.is_file() else None
