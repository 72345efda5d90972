"""Data of a task from a folder in SentEval's layout (`downstream/`, `probing/`), their check, and their download.

`published.json` has git's hash of every published file and the number of rows; "basis" there gives the source of its
figures. Data with the published hashes are the published ones.

`declutr evaluate --download DIR` fetches what is missing. `sources.json` has the addresses: single files, one tar
archive with the files of all other tasks, and the tasks whose data cannot be fetched, with the reason. An archive is
never extracted. Its members are read as streams, and only regular files of tasks and of plausible size are written,
each under a name chosen here.
"""

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from declutr.common.console.terminal import excerpt
from declutr.common.errors import DataError, MissingDataError, RemoteError
from declutr.common.storage import atomic_file, read_json
from declutr.evaluation.senteval.formats import SplitRows
from declutr.evaluation.senteval.tasks import EMPTY, Inspection, SentEvalTask, Split, Standing, TaskData, find


def load(task: SentEvalTask, folder: Path) -> TaskData:
    """Read a task as SentEval does, with rows in the order in which SentEval passes them to its classifiers.

    Raises:
        MissingDataError: no file of the task exists.
        DataError: files are missing or cannot be read; the message names file and line.
    """
    place, paths = folder / task.folder, [folder / name for name in task.paths]
    if missing := [path.name for path in paths if not path.is_file()]:
        if task.procedure == "retrieval" and (pickles := sorted(path.name for path in place.glob("*.pkl"))):
            raise DataError(
                f"{place}: {', '.join(pickles)} are pickles, which run code when read and are never opened here; "
                "convert them elsewhere to <split>.npy and <split>.captions.txt (docs/guides/evaluate.md)"
            )
        kind = MissingDataError if len(missing) == len(paths) else DataError
        there = f" ({len(paths) - len(missing)} of {len(paths)} files are there)" if kind is DataError else ""
        raise kind(
            f"{place}: no {excerpt(missing)}{there}; --data names the folder that holds "
            f"{task.folder.partition('/')[0]}/, and names of files are case-sensitive"
        )
    rows: dict[str, Any] = {split: task.read(*(place / name for name in names)) for split, names in task.files.items()}
    classes = task.classes
    if task.group == "probing":
        rows = rows["all"]  # one file holds all splits
        classes = tuple(sorted(set(rows["train"].labels)))
    return TaskData(
        task=task,
        splits={name: _in_official_order(task, part, classes, name) for name, part in rows.items()},
        classes=classes,
        files={name: git_sha1(folder / name) for name in task.paths},
        features={name: part.features for name, part in rows.items() if part.features is not None},
    )


def _in_official_order(task: SentEvalTask, rows: SplitRows, classes: tuple[str, ...], split: str) -> Split:
    """Sort by numbers of words, then label."""
    labels = _numbers(task, rows, classes, split)
    first, second = (np.array([len(words) for words in side], dtype=np.int64) for side in (rows.first, rows.second))
    last: NDArray[Any] = labels
    if task.name == "SNLI":  # by hypothesis first, and labels by their names
        first, second = second, first
        last = np.array([sorted(classes).index(classes[label]) for label in labels], dtype=np.int64)
    if task.procedure == "retrieval":
        order = np.arange(len(labels))  # captions belong to the images of their places
    else:
        # Folds and batches of the classifiers follow this order.
        order = np.lexsort((last, second, first) if rows.second else (last, first))  # stable, the last key leads
    return Split(
        first=tuple(" ".join(rows.first[row]) or EMPTY for row in order),
        second=tuple(" ".join(rows.second[row]) or EMPTY for row in order) if rows.second else None,
        labels=labels[order],
    )


def _numbers(task: SentEvalTask, rows: SplitRows, classes: tuple[str, ...], split: str) -> NDArray[Any]:
    if task.group != "probing":
        scores = task.procedure in ("relatedness", "similarity", "cosine")
        return np.array(rows.labels, dtype=np.float64 if scores else np.int64)
    numbers: dict[Any, int] = {name: number for number, name in enumerate(classes)}
    if unknown := sorted({str(label) for label in rows.labels if label not in numbers}):
        raise DataError(f"{task.name}: {split} has classes that train does not have: {', '.join(unknown[:5])}")
    return np.array([numbers[label] for label in rows.labels], dtype=np.int64)


def git_sha1(path: Path) -> str:
    """Git's SHA-1 of a file's content, as `git ls-tree` shows it, for comparison with published repositories."""
    head = f"blob {path.stat().st_size}\0".encode()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.sha1(head, usedforsecurity=False)).hexdigest()


UNCHECKED = "--allow-unchecked scores your own data; such scores are marked as not comparable with published ones"
_SHOWN: Mapping[Standing, str] = {
    "identical": "the published files, byte for byte",
    "unverified": "no published hash is known here: scores are marked",
    "unpublished": "NOT the published set: scores are marked and not comparable",
    "refused": "REFUSED",
    "missing": "missing",
}


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Figures of every task, by name.

    `rows` has the scored rows by split or subset, of the probing tasks a rounded number; `files` git's SHA-1 of every
    file by its path in the data folder, empty if unknown; `basis` the source of both.
    """
    return read_json(Path(__file__).with_name("published.json"))["tasks"]


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
    hashes = published()[task.name]["files"]
    if hashes and dict(data.files) == hashes:  # of COCO, published as pickles, no hash is known
        return Inspection(task, "identical", (), data)
    problems = []
    if other := [path for path, digest in hashes.items() if data.files[path] != digest]:
        names = excerpt([path.rpartition("/")[2] for path in other])
        problems.append(
            f"{len(other)} of {len(hashes)} files differ from the published ones: {names}; get them again, without a "
            "change of words, line ends or encoding (`declutr evaluate --download` fetches missing files)"
        )
    problems += _other_rows(data)
    if not problems:
        unknown = f"{task.label}: no hash of the published files is known here; the numbers of rows match"
        return Inspection(task, "unverified", (unknown,), data)
    return Inspection(task, "unpublished" if allow_unchecked else "refused", tuple(problems), data)


def _other_rows(data: TaskData) -> Iterator[str]:
    """Numbers of rows that are not the published ones."""
    figures = published()[data.task.name]
    # the published numbers of the probing tasks are rounded
    about, per_mille = ("about ", 2) if figures["basis"] == "probing" else ("", 0)
    for name, rows in figures["rows"].items():
        if abs((count := len(data.splits[name])) - rows) > rows * per_mille / 1000:
            where = f"{data.task.label} {name}" if len(figures["rows"]) > 1 else data.task.label
            yield f"{where}: {count:,} rows, published {about}{rows:,}"


def overview(inspections: Sequence[Inspection]) -> Iterator[str]:
    """Format a line per task, what was found below it, and a summary."""
    for inspection in inspections:
        rows = f"{inspection.data.num_rows:>9,} rows" if inspection.data else " " * 14
        yield f"{inspection.task.label:9s} {rows}  {_SHOWN[inspection.standing]}"
        yield from (f"{'':26s}{line}" for line in inspection.findings)
    counts = Counter(inspection.standing for inspection in inspections)
    yield ", ".join(f"{number} {standing}" for standing, number in counts.items())
    if counts["refused"]:
        yield UNCHECKED


_MAX_BYTES = 2 << 30  # of the archive
_MAX_MEMBER_BYTES = 256 << 20  # no published file has as many, and a compressed archive may unpack to any size
_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_ATTEMPTS = 3
_BELOW = "downstream/"  # folder of the data of which names in the archive lack the name


class Fetched(NamedTuple):
    """Result for one file, by its path relative to the data folder."""

    path: str
    outcome: Literal["fetched", "kept", "failed"]  # kept: it existed
    note: str = ""  # reason of the failure, or a remark


@cache
def sources() -> dict[str, Any]:
    """The content of `sources.json`: `files` (address by path), `archive` (`url`), `gone` (reason by task)."""
    return read_json(Path(__file__).with_name("sources.json"))


def fetch(url: str, target: Path, expected: str = "") -> None:
    """Fetch `url` to `target`, completely or not at all; a broken connection begins again, at most three times.

    `expected` is git's SHA-1 of the content, "" if unknown.
    """
    if not url.startswith(("http://", "https://")):
        raise RemoteError(f"{url}: is no address that starts with http:// or https://")
    # identity, because urllib would keep a compressed body as it is
    request = urllib.request.Request(url, headers={"User-Agent": "declutr", "Accept-Encoding": "identity"})
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with atomic_file(target) as aside:
                with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer, aside.open("wb") as stream:
                    length, size = answer.headers.get("Content-Length"), 0
                    while chunk := answer.read(_CHUNK_BYTES):
                        size += len(chunk)
                        if size > _MAX_BYTES:  # a server may announce another length, or none
                            raise RemoteError(f"{url}: exceeds the limit of {_MAX_BYTES:,} bytes")
                        stream.write(chunk)
                # Read in chunks, http.client raises nothing for a body that is too short.
                if length is not None and size != int(length):
                    raise OSError(f"the connection ended after {size:,} of {int(length):,} bytes")
                if expected and (digest := git_sha1(aside)) != expected:
                    raise RemoteError(f"{url}: has git SHA-1 {digest}, but the published file has {expected}")
        except RemoteError:  # an OSError too, but no other attempt helps
            raise
        except urllib.error.HTTPError as error:  # likewise: the server has answered
            raise RemoteError(f"{url}: {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if attempt == _ATTEMPTS:
                raise RemoteError(f"{url}: {error}; run the same command again") from error
        else:
            return


def download(
    folder: Path,  # the data folder
    names: Collection[str],  # of the tasks
    # address of a copy, with a file at `mirror/<path>`, an archive at `mirror/<its file name>`; None: the public
    # sources. A single file must have its known hash, wherever it comes from.
    mirror: str | None,
    say: Callable[[str], None] = lambda _: None,  # called with a line before each transfer
) -> list[Fetched]:
    """Fetch all missing files of tasks; continue after failures.

    Returns:
        A result for each file. An existing file is kept, whatever its content: the check reports errors in it.
    """
    paths = dict.fromkeys(path for name in names if name not in sources()["gone"] for path in find(name).paths)
    fetched = [Fetched(path, "kept") for path in paths if (folder / path).exists()]
    singles, todo = sources()["files"], [path for path in paths if not (folder / path).exists()]
    in_archive = [path for path in todo if path not in singles]
    for path in (path for path in todo if path in singles):
        url = f"{mirror.rstrip('/')}/{path}" if mirror else singles[path]
        say(f"{path} from {url}")
        try:
            fetch(url, folder / path, known_hashes()[path])
            fetched.append(Fetched(path, "fetched"))
        except RemoteError as error:
            fetched.append(Fetched(path, "failed", str(error)))
    if in_archive:
        url = sources()["archive"]["url"]
        url = f"{mirror.rstrip('/')}/{url.rpartition('/')[2]}" if mirror else url
        say(f"{len(in_archive)} files from {url}")
        fetched += _fetch_archive(folder, url, in_archive)
    return fetched


def _fetch_archive(folder: Path, url: str, missing: Sequence[str]) -> Iterator[Fetched]:
    """Fetch an archive and write the missing files of it; report those that it lacks as failed."""
    local = folder / ".downloads" / url.rpartition("/")[2]
    ends = {f"/{path.removeprefix(_BELOW)}": path for path in missing}
    try:
        fetch(url, local)
        with tarfile.open(local, mode="r|*") as archive:  # a stream: one pass, no seeking, no extraction
            for member in archive:
                # Below a folder of any name, files have their places in `downstream`.
                end = next((end for end in ends if f"/{member.name}".endswith(end)), None)
                if end is None or not member.isreg():
                    continue
                path = ends[end]
                if member.size > _MAX_MEMBER_BYTES:
                    yield Fetched(path, "failed", f"{member.size:,} bytes in the archive, more than any published file")
                elif stream := archive.extractfile(member):  # as of every regular file
                    with atomic_file(folder / path) as aside, aside.open("wb") as file:
                        shutil.copyfileobj(stream, file)
                    same = git_sha1(folder / path) == known_hashes()[path]
                    yield Fetched(path, "fetched", "" if same else "differs from the copy with the known hash")
                del ends[end]  # what is left at the end is missing; a break in a file leaves it among them
        yield from (Fetched(path, "failed", f"not in {local.name}") for path in ends.values())
    except (RemoteError, tarfile.TarError, EOFError) as error:
        yield from (Fetched(path, "failed", str(error)) for path in ends.values())
    finally:
        shutil.rmtree(local.parent, ignore_errors=True)


def transfers(fetched: Sequence[Fetched], names: Collection[str]) -> Iterator[str]:
    """List fetched files, failures with reasons, and chosen tasks that cannot be fetched."""
    counts = Counter(file.outcome for file in fetched)
    yield f"files: {counts['fetched']} fetched, {counts['kept']} already present, {counts['failed']} failed"
    notes: dict[tuple[str, str], list[str]] = {}
    for file in fetched:
        if file.note:
            notes.setdefault((file.outcome, file.note), []).append(file.path)
    for (outcome, note), paths in notes.items():
        yield f"  {outcome}: {excerpt(paths)}: {note}"
    for name, why in sources()["gone"].items():
        if name in names:
            yield f"  cannot be fetched: {name}: {why}"
