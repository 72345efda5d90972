"""`declutr evaluate --download DIR`: fetches all available data into SentEval's layout and compares hashes.

`sources.json` has the addresses: single files, one tar archive, and data that cannot be fetched, with the reason. An
archive is never extracted. Its members are read as streams, and only wanted regular files of plausible size are
written, each under a name chosen here.
"""

import http.client
import json
import shutil
import tarfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from declutr.common.console.terminal import excerpt
from declutr.common.errors import RemoteError
from declutr.common.storage import atomic_file
from declutr.evaluation.senteval.data.checking import known_hashes
from declutr.evaluation.senteval.data.lines import git_sha1
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import find

_MAX_FILE_BYTES = 256 << 20
_MAX_ARCHIVE_BYTES = 2 << 30
_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_ATTEMPTS = 3
_BELOW = "downstream/"
"""Folder of the data of which names in the archive lack the name."""


@dataclass(frozen=True)
class Fetched:
    """Result for one file, by its path relative to the data folder."""

    path: str
    outcome: Literal["fetched", "kept", "failed"]
    """kept: it existed."""
    note: str = ""
    """Reason of the failure, or a remark."""


@cache
def sources() -> dict[str, Any]:
    """The content of `sources.json`: `files` (address by path), `archive` (`url`, `paths`), `gone`."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("sources.json").read_bytes())
    return content


def fetch(url: str, target: Path, max_bytes: int, expected: str = "") -> None:
    """Fetch `url` to `target`, completely or not at all; a broken connection begins again, at most three times.

    Args:
        url: http or https.
        target: the file.
        max_bytes: limit of its size.
        expected: git's SHA-1 of the content; "" if unknown.

    Raises:
        RemoteError: the file was not found, is too large, broke off three times, or has another hash.
    """
    if not url.startswith(("http://", "https://")):
        raise RemoteError(f"{url}: is no address that starts with http:// or https://")
    request = urllib.request.Request(url, headers={"User-Agent": "declutr", "Accept-Encoding": "identity"})
    last = ""
    for _ in range(_ATTEMPTS):
        try:
            with atomic_file(target) as aside:
                _receive(request, aside, max_bytes)
                if expected and (digest := git_sha1(aside)) != expected:
                    raise RemoteError(f"{url}: has git SHA-1 {digest}, but the published file has {expected}")
        except RemoteError:
            raise
        except urllib.error.HTTPError as error:
            raise RemoteError(f"{url}: {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        else:
            return
    raise RemoteError(f"{url}: {last}; run the same command again")


def _receive(request: urllib.request.Request, path: Path, max_bytes: int) -> None:
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer, path.open("wb") as stream:
        length, size = answer.headers.get("Content-Length"), 0
        while chunk := answer.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > max_bytes:
                raise RemoteError(f"{request.full_url}: exceeds the limit of {max_bytes:,} bytes")
            stream.write(chunk)
    if length is not None and size != int(length):
        raise OSError(f"the connection ended after {size:,} of {int(length):,} bytes")


def download(
    folder: Path, names: Collection[str], mirror: str | None, tell: Callable[[str], None] = lambda _: None
) -> tuple[Fetched, ...]:
    """Fetch all missing files of tasks; continue after failures.

    Args:
        folder: the data folder.
        names: of the tasks.
        mirror: address of a copy, with a file at `mirror/<path>`, an archive at `mirror/<its file name>`; None: the
            public sources. A file with a known hash must have it, wherever it comes from.
        tell: called with a line before each transfer.

    Returns:
        A result for each file. An existing file is kept, whatever its content: the check reports errors in it.
    """
    paths = {path for name in names for path in task_files(find(name))}
    published, outcomes = sources(), list[Fetched]()
    for path, url in published["files"].items():
        if path in paths:
            outcomes.append(_fetch_file(folder, path, f"{mirror.rstrip('/')}/{path}" if mirror else url, tell))
    url = published["archive"]["url"]
    archive = f"{mirror.rstrip('/')}/{url.rpartition('/')[2]}" if mirror else url
    outcomes += _fetch_archive(folder, archive, [path for path in published["archive"]["paths"] if path in paths], tell)
    return tuple(outcomes)


def _fetch_file(folder: Path, path: str, url: str, tell: Callable[[str], None]) -> Fetched:
    if (folder / path).exists():
        return Fetched(path, "kept")
    tell(f"{path} from {url}")
    try:
        fetch(url, folder / path, _MAX_FILE_BYTES, known_hashes()[path])
    except RemoteError as error:
        return Fetched(path, "failed", str(error))
    return Fetched(path, "fetched")


def _fetch_archive(folder: Path, url: str, paths: Sequence[str], tell: Callable[[str], None]) -> Iterator[Fetched]:
    missing = [path for path in paths if not (folder / path).exists()]
    yield from (Fetched(path, "kept") for path in paths if path not in missing)
    if not missing:
        return
    local = folder / ".downloads" / url.rsplit("/", 1)[-1]
    tell(f"{len(missing)} files from {url}")
    try:
        fetch(url, local, _MAX_ARCHIVE_BYTES)
        yield from _take(local, folder, missing)
    except (RemoteError, tarfile.TarError, EOFError) as error:
        yield from (Fetched(path, "failed", str(error)) for path in missing if not (folder / path).exists())
    finally:
        local.unlink(missing_ok=True)
        if local.parent.exists() and not any(local.parent.iterdir()):
            local.parent.rmdir()


def _take(local: Path, folder: Path, missing: Sequence[str]) -> Iterator[Fetched]:
    """Write the missing files of an archive; report those that it lacks as failed."""
    ends = {f"/{path.removeprefix(_BELOW)}": path for path in missing}
    with tarfile.open(local, mode="r|*") as archive:  # a stream: one pass, no seeking, no extraction
        for member in archive:
            end = next((end for end in ends if f"/{member.name}".endswith(end)), None)
            if end is None or not member.isreg():
                continue
            path = ends.pop(end)
            if member.size > _MAX_FILE_BYTES:
                yield Fetched(path, "failed", f"{member.size:,} bytes in the archive, more than any published file")
            elif (stream := archive.extractfile(member)) is not None:
                with atomic_file(folder / path) as aside, aside.open("wb") as file:
                    shutil.copyfileobj(stream, file)
                same = git_sha1(folder / path) == known_hashes().get(path)
                yield Fetched(path, "fetched", "" if same else "differs from the copy with the known hash")
    yield from (Fetched(path, "failed", f"not in {local.name}") for path in ends.values())


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
