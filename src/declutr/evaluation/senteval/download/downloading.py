"""`declutr evaluate --download DIR`: fetches all available data into SentEval's layout and checks each file.

An archive is never extracted. Its members are read as streams, and only wanted regular files of plausible size are
written, each under a name chosen here.
"""

import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from declutr.common.console.terminal import excerpt
from declutr.common.storage import atomic_file
from declutr.evaluation.senteval.checks.checking import UNCHECKED
from declutr.evaluation.senteval.data.lines import git_sha1
from declutr.evaluation.senteval.data.taskdata import Inspection
from declutr.evaluation.senteval.data.tasks import find
from declutr.evaluation.senteval.download.snli_archive import FILES, SnliError, make_split
from declutr.evaluation.senteval.download.sources import RemoteArchive, RemoteFile, RemoteSnli, Sources, known_hashes
from declutr.evaluation.senteval.download.transfer import TransferError, fetch

_MAX_FILE_BYTES = 256 << 20
_MAX_ARCHIVE_BYTES = 2 << 30


@dataclass(frozen=True)
class Fetched:
    """Result for one file, by its path relative to the data folder."""

    path: str
    outcome: Literal["fetched", "kept", "failed"]
    """kept: it existed."""
    note: str = ""
    """Reason of the failure, or a remark."""


def download(folder: Path, sources: Sources, tell: Callable[[str], None] = lambda _: None) -> tuple[Fetched, ...]:
    """Fetch all missing files; continue after failures.

    An existing file is kept, whatever its content: the check of the tasks reports errors in it. `tell` is called with a
    line before each transfer.
    """
    outcomes = [_fetch_file(folder, file, tell) for file in sources.files]
    for archive in sources.archives:
        outcomes += _fetch_archive(folder, archive, tell)
    if sources.snli:
        outcomes += _make_snli(folder, sources.snli, tell)
    return tuple(outcomes)


def _fetch_file(folder: Path, file: RemoteFile, tell: Callable[[str], None]) -> Fetched:
    target = folder / file.path
    if target.exists():
        return Fetched(file.path, "kept")

    def verify(path: Path) -> None:
        if file.expected and (found := git_sha1(path)) != file.expected:
            raise ValueError(f"has git SHA-1 {found}, but the published file has {file.expected}")

    tell(f"{file.path} from {file.url}")
    try:
        fetch(file.url, target, _MAX_FILE_BYTES, verify)
    except TransferError as error:
        return Fetched(file.path, "failed", str(error))
    return Fetched(file.path, "fetched", "" if file.expected else "no published hash to compare with")


def _fetch_archive(folder: Path, archive: RemoteArchive, tell: Callable[[str], None]) -> list[Fetched]:
    wanted = [path for path in archive.paths if not (folder / path).exists()]
    kept = [Fetched(path, "kept") for path in archive.paths if path not in wanted]
    if not wanted:
        return kept
    held = folder / ".downloads" / archive.url.rsplit("/", 1)[-1]
    tell(f"{len(wanted)} files from {archive.url}")
    try:
        if not held.exists():
            fetch(archive.url, held, _MAX_ARCHIVE_BYTES)
        done = list(_take(held, folder, wanted, archive.below))
    except (TransferError, tarfile.TarError, EOFError) as error:
        if not isinstance(error, TransferError):
            held.unlink()  # not an archive, or a broken one: the next call fetches it again
        lacking = [path for path in wanted if not (folder / path).exists()]
        return kept + [Fetched(path, "failed", str(error)) for path in lacking]
    _discard(held)
    return kept + done


def _make_snli(folder: Path, snli: RemoteSnli, tell: Callable[[str], None]) -> Iterator[Fetched]:
    """Make the three files of each split; skip a split if one of its files exists."""
    below = find("SNLI").folder
    parts = {split: [f"{below}/{name}.{split}" for name in FILES] for split in ("train", "dev", "test")}
    wanted = {split: paths for split, paths in parts.items() if not any((folder / path).exists() for path in paths)}
    yield from (Fetched(path, "kept") for split in parts if split not in wanted for path in parts[split])
    if not wanted:
        return
    held = folder / ".downloads" / snli.url.rsplit("/", 1)[-1]
    tell(f"SNLI from {snli.url}; tokenising it takes some minutes")
    hashes = {path.rsplit("/", 1)[-1]: digest for path, digest in known_hashes().items() if path.startswith(below)}
    for split, paths in wanted.items():
        try:
            if not held.exists():
                fetch(snli.url, held, _MAX_ARCHIVE_BYTES)
            make_split(held, split, folder / below, hashes)
            yield from (Fetched(path, "fetched") for path in paths)
        except (TransferError, SnliError) as error:
            yield from (Fetched(path, "failed", str(error)) for path in paths)
    _discard(held)


def _discard(held: Path) -> None:
    held.unlink(missing_ok=True)
    if held.parent.exists() and not any(held.parent.iterdir()):
        held.parent.rmdir()


def _take(held: Path, folder: Path, wanted: list[str], below: str) -> Iterator[Fetched]:
    """Write the wanted members; report those missing in the archive as failed."""
    ends = {path.removeprefix(below): path for path in wanted}
    with tarfile.open(held, mode="r|*") as archive:  # a stream: one pass, no seeking, no extraction
        for member in archive:
            path = next((ends[end] for end in _ends(member.name) if end in ends), None)
            if path is None or not member.isreg():
                continue
            del ends[path.removeprefix(below)]
            if member.size > _MAX_FILE_BYTES:
                yield Fetched(path, "failed", f"{member.size:,} bytes in the archive, more than any published file")
                continue
            stream = archive.extractfile(member)
            if stream is not None:
                with atomic_file(folder / path) as aside, aside.open("wb") as file:
                    shutil.copyfileobj(stream, file)
                same = git_sha1(folder / path) == known_hashes().get(path)
                yield Fetched(path, "fetched", "" if same else "differs from the copy with the known hash")
    for path in ends.values():
        yield Fetched(path, "failed", f"not in {held.name}")


def _ends(name: str) -> Iterator[str]:
    """Yield `a/b/c`, `b/c`, `c` of a member's name."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    for first in range(len(parts)):
        yield "/".join(parts[first:])


_SAID = {
    "identical": "the published files, byte for byte",
    "published": "every row as published, other bytes: scores are marked",
    "altered": "NOT the published files: scores are marked",
    "unpublished": "NOT the published set: scores are marked and not comparable",
    "refused": "REFUSED",
    "missing": "missing",
}


def overview(inspections: Sequence[Inspection]) -> Iterator[str]:
    """Format a line per task, its warnings and reasons below it, and a summary."""
    for inspection in inspections:
        rows = f"{inspection.data.num_rows:>9,} rows" if inspection.data else " " * 14
        yield f"{inspection.task.label:9s} {rows}  {_SAID[inspection.standing]}"
        told = [finding for finding in inspection.findings if finding.level != "info"]
        yield from (f"{'':26s}{finding.what}" for finding in told)
        if inspection.standing == "refused":  # several findings can fake the same score
            faked = dict.fromkeys(finding.faked for finding in told if finding.faked)
            yield from (f"{'':26s}a score would be: {what}" for what in faked)
    counts = Counter(inspection.standing for inspection in inspections)
    yield ", ".join(f"{number} {standing}" for standing, number in counts.items())
    if counts["refused"]:
        yield UNCHECKED


def transfers(fetched: Sequence[Fetched], sources: Sources) -> Iterator[str]:
    """List fetched files, failures with reasons, and files that cannot be fetched."""
    counts = Counter(file.outcome for file in fetched)
    yield f"files: {counts['fetched']} fetched, {counts['kept']} already present, {counts['failed']} failed"
    notes: dict[tuple[str, str], list[str]] = {}
    for file in fetched:
        if file.note:
            notes.setdefault((file.outcome, file.note), []).append(file.path)
    for (outcome, note), paths in notes.items():
        yield f"  {outcome}: {excerpt(paths)}: {note}"
    for gone in sources.gone:
        yield f"  cannot be fetched: {', '.join(gone.tasks)}: {gone.why}"
