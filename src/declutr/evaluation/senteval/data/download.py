"""`declutr evaluate --download DIR`: fetches all available data into SentEval's layout and compares hashes.

`sources.json` has the addresses: single files, one tar archive, SNLI's zip, and data that cannot be fetched, with the
reason. An archive is never extracted. Its members are read as streams, and only wanted regular files of plausible size
are written, each under a name chosen here.

SNLI in SentEval's form, made from the corpus' zip: labels, premises and hypotheses, a file each, tokenised.

The zip is read as a stream, member by member, without extraction. A file is kept only if it has the published hash;
otherwise its tokenisation would differ from SentEval's.

Its sentences are tokenized as the Penn Treebank, one a line. The rules are those of the Penn Treebank project's sed
script of 1995 (SentEval's data/downstream/tokenizer.sed), to the byte, including a space after every sentence, so that
files can be compared with published hashes.
"""

import http.client
import io
import json
import re
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from declutr.common.console.terminal import excerpt
from declutr.common.errors import DataError, RemoteError
from declutr.common.storage import atomic_file
from declutr.evaluation.senteval.data.checking import known_hashes
from declutr.evaluation.senteval.data.lines import git_sha1
from declutr.evaluation.senteval.data.loading import task_files
from declutr.evaluation.senteval.data.tasks import find

_CONTRACTED = ("ll", "re", "ve", "LL", "RE", "VE")
_MERGED = {  # contractions spoken as one word, and their parts
    r"([Cc])annot": r"\1an not",
    r"([Dd])'ye": r"\1' ye",
    r"([Gg])imme": r"\1im me",
    r"([Gg])onna": r"\1on na",
    r"([Gg])otta": r"\1ot ta",
    r"([Ll])emme": r"\1em me",
    r"([Mm])ore'n": r"\1ore 'n",
    r"'([Tt])is": r"'\1 is",
    r"'([Tt])was": r"'\1 was",
    r"([Ww])anna": r"\1an na",
}
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'^"', "`` "),  # a quote opens at the start and after a space or a bracket; every other one closes
        (r'([ (\[{<])"', r"\1 `` "),
        (r"\.\.\.", " ... "),
        (r"[,;:@#$%&]", r" \g<0> "),
        (r"([^.])(\.)([\])}>\"']*) *$", r"\1 \2\3 "),  # only the last full stop: others may be abbreviations
        (r"[?!]", r" \g<0> "),
        (r"[\]\[(){}<>]", r" \g<0> "),
        (r"--", " -- "),
        (r"$", " "),
        (r"^", " "),
        (r'"', " '' "),
        (r"([^'])' ", r"\1 ' "),
        (r"'([sSmMdD]) ", r" '\1 "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[:3]),
        ("n't ", " n't "),
        *((f"'{end} ", f" '{end} ") for end in _CONTRACTED[3:]),
        ("N'T ", " N'T "),
        *((f" {word} ", f" {parts} ") for word, parts in _MERGED.items()),
        (r" +", " "),
        (r"^ *", ""),
    )
]


def tokenize(line: str) -> str:
    """Separate words by one space, with one after the last; `line` has no line end."""
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line


FILES = ("labels", "s1", "s2")
_COLUMNS = ("gold_label", "sentence1", "sentence2")
_MAX_LINE_CHARACTERS = 1 << 20


def make_split(archive: Path, split: str, folder: Path, hashes: dict[str, str]) -> None:
    """Write `labels.<split>`, `s1.<split>` and `s2.<split>` into `folder`, all three or none.

    `hashes` has the required git SHA-1 of each file, by name; a file without one is not checked.

    Raises:
        DataError: the zip lacks the split or has other columns, or a file has another hash.
    """
    paths = [folder / f"{name}.{split}" for name in FILES]
    with atomic_file(paths[0]) as labels, atomic_file(paths[1]) as first, atomic_file(paths[2]) as second:
        with labels.open("wb") as one, first.open("wb") as two, second.open("wb") as three:
            for label, premise, hypothesis in _pairs(archive, f"snli_1.0_{split}.txt"):
                one.write(f"{label}\n".encode())
                two.write(f"{tokenize(premise)}\n".encode())
                three.write(f"{tokenize(hypothesis)}\n".encode())
        for path, aside in zip(paths, (labels, first, second), strict=True):
            expected = hashes.get(path.name, "")
            if expected and (found := git_sha1(aside)) != expected:
                raise DataError(f"{path.name} made from {archive.name} has git SHA-1 {found}, expected {expected}")


def _pairs(archive: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield label, premise and hypothesis of every pair with a label."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.namelist() if member.rsplit("/", 1)[-1] == name]
            members = [member for member in members if "__MACOSX" not in member]
            if len(members) != 1:
                raise DataError(f"{archive.name} holds {len(members)} files named {name}, expected one")
            with opened.open(members[0]) as stream, io.TextIOWrapper(stream, encoding="utf-8", newline="\n") as lines:
                header = lines.readline(_MAX_LINE_CHARACTERS).rstrip("\n").split("\t")
                if (header[0], *header[5:7]) != _COLUMNS:
                    raise DataError(f"{name} has columns {', '.join(header[:7])}, unlike SNLI 1.0")
                while line := lines.readline(_MAX_LINE_CHARACTERS):
                    cells = line.rstrip("\n").split("\t")
                    if cells[0] != "-":
                        yield cells[0], cells[5], cells[6]
    except (zipfile.BadZipFile, IndexError, UnicodeDecodeError) as error:
        raise DataError(f"{archive.name} is broken or not SNLI 1.0: {error}") from error


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
    """The content of `sources.json`: `files` (address by path), `archive` (`url`, `paths`), `snli`, `gone`."""
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
                if expected and (found := git_sha1(aside)) != expected:
                    raise RemoteError(f"{url}: has git SHA-1 {found}, but the published file has {expected}")
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
    wanted = {path for name in names for path in task_files(find(name))}
    known, outcomes = sources(), list[Fetched]()
    for path, url in known["files"].items():
        if path in wanted:
            outcomes.append(_fetch_file(folder, path, f"{mirror.rstrip('/')}/{path}" if mirror else url, tell))
    archive, snli = (_moved(url, mirror) for url in (known["archive"]["url"], known["snli"]))
    outcomes += _fetch_archive(folder, archive, [path for path in known["archive"]["paths"] if path in wanted], tell)
    if "SNLI" in names:
        outcomes += _make_snli(folder, snli, tell)
    return tuple(outcomes)


def _moved(url: str, mirror: str | None) -> str:
    """The address of an archive, on the mirror if there is one."""
    return f"{mirror.rstrip('/')}/{url.rsplit('/', 1)[-1]}" if mirror else url


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
        _discard(local)


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


def _make_snli(folder: Path, url: str, tell: Callable[[str], None]) -> Iterator[Fetched]:
    """Make the three files of each split; skip a split if one of its files exists."""
    below = find("SNLI").folder
    parts = {split: [f"{below}/{name}.{split}" for name in FILES] for split in ("train", "dev", "test")}
    missing = {split: paths for split, paths in parts.items() if not any((folder / path).exists() for path in paths)}
    yield from (Fetched(path, "kept") for split in parts if split not in missing for path in parts[split])
    if not missing:
        return
    local = folder / ".downloads" / url.rsplit("/", 1)[-1]
    tell(f"SNLI from {url}; tokenising it takes some minutes")
    hashes = {path.rsplit("/", 1)[-1]: digest for path, digest in known_hashes().items() if path.startswith(below)}
    try:
        fetch(url, local, _MAX_ARCHIVE_BYTES)
        for split in list(missing):
            make_split(local, split, folder / below, hashes)
            yield from (Fetched(path, "fetched") for path in missing.pop(split))
    except (RemoteError, DataError) as error:
        yield from (Fetched(path, "failed", str(error)) for paths in missing.values() for path in paths)
    finally:
        _discard(local)


def _discard(local: Path) -> None:
    local.unlink(missing_ok=True)
    if local.parent.exists() and not any(local.parent.iterdir()):
        local.parent.rmdir()


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
