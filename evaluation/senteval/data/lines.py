"""Lines of a file as SentEval's loaders see them, and git's name for a file's content."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from evaluation.senteval.data.taskdata import DataError

Parsed = TypeVar("Parsed")

_UNREADABLE = "the words of these lines would be others than the published ones"


def read_lines(path: Path, encoding: str, unicode_breaks: bool = False) -> list[str]:
    """Lines without their ends.

    Args:
        path: the file.
        encoding: the one the official loader of this task opens it with.
        unicode_breaks: lines also end at the rarer separators (form feed, NEL, U+2028...), as `str.splitlines` has it;
            some of the official loaders use it, others iterate the file.

    Raises:
        DataError: no such file, no text in that encoding (the first bad line is named), or a pickle, LFS pointer or
            web page in its place.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    _refuse_foreign(path, content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        bad = sum(not _decodes(line, encoding) for line in content.split(b"\n"))
        raise DataError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is no {encoding}; {bad} lines are not, so the "
            "file was probably saved in latin-1 (ISO 8859-1): get it as published, do not convert it by guess",
            faked=_UNREADABLE,
        ) from error
    if unicode_breaks:
        return io.StringIO(text, newline=None).read().splitlines()  # universal newlines first, as `open` does
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def parse_lines(path: Path, lines: list[str], parse: Callable[[str], Parsed], skipped: int = 0) -> list[Parsed]:
    """Every line but the first `skipped` through `parse`.

    Raises:
        DataError: `parse` raised ValueError, KeyError or IndexError at a line; it is named.
    """
    parsed = []
    for number, line in enumerate(lines[skipped:], start=skipped + 1):
        try:
            parsed.append(parse(line))
        except (ValueError, KeyError, IndexError) as error:
            if not line.strip():
                raise DataError(
                    f"{path}, line {number} is blank: a row is lost there, or the line was added"
                ) from error
            shown = line if len(line) <= 60 else f"{line[:60]}..."
            what = "is cut short" if isinstance(error, IndexError) else f"cannot be read ({error})"
            raise DataError(f"{path}, line {number} {what}: {shown!r}") from error
    return parsed


def git_sha1(path: Path) -> str:
    """Git's SHA-1 of a file's content: what `git ls-tree` shows, so that published repositories can be compared."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _decodes(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _refuse_foreign(path: Path, content: bytes) -> None:
    """Raises DataError for what downloads leave in a file's place."""
    head = content[:512].lstrip().lower()
    if not content:
        raise DataError(f"{path} is empty: its download failed")
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DataError(f"{path} is a web page, not data: its download address is dead")
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{path} is a Git LFS pointer, not data: fetch it with `git lfs pull`")
    if b"\0" in content[:4096]:
        raise DataError(f"{path} holds zero bytes, so it is no text: an archive, a pickle, or UTF-16")
