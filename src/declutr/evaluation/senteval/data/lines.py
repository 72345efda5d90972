"""Lines of a file as SentEval's loaders read them, and git's hash of a file's content."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from declutr.common.errors import DataError

Parsed = TypeVar("Parsed")


def read_lines(path: Path, encoding: str, unicode_breaks: bool = False) -> list[str]:
    """Lines without their ends, in the encoding with which the official loader of the task opens the file.

    `unicode_breaks` ends lines also at the rarer separators (form feed, NEL, U+2028...), as `str.splitlines` does. Some
    of the official loaders use it, others iterate over the file.

    Raises:
        DataError: the file is missing or not text in that encoding (the message names the first bad line), or a pickle,
            LFS pointer or web page replaced it.
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
        raise DataError(
            f"{path}, line {number}: byte 0x{content[error.start]:02x} is not {encoding}, probably because the file is "
            "saved in latin-1 (ISO 8859-1): get the published file, do not convert it"
        ) from error
    if unicode_breaks:
        return io.StringIO(text, newline=None).read().splitlines()  # universal newlines first, as `open` does
    return [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]


def parse_lines(path: Path, lines: list[str], parse: Callable[[str], Parsed], skipped: int = 0) -> list[Parsed]:
    """Parse every line except the first `skipped`.

    Raises:
        DataError: `parse` raised ValueError, KeyError or IndexError; the message names the line.
    """
    parsed = []
    for number, line in enumerate(lines[skipped:], start=skipped + 1):
        try:
            parsed.append(parse(line))
        except (ValueError, KeyError, IndexError) as error:
            if not line.strip():
                raise DataError(
                    f"{path}, line {number} is blank: a row was lost there, or the line was added"
                ) from error
            text = line if len(line) <= 60 else f"{line[:60]}..."
            what = "is cut short" if isinstance(error, IndexError) else f"cannot be read ({error})"
            raise DataError(f"{path}, line {number} {what}: {text!r}") from error
    return parsed


def git_sha1(path: Path) -> str:
    """Git's SHA-1 of a file's content, as `git ls-tree` shows it, for comparison with published repositories."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _refuse_foreign(path: Path, content: bytes) -> None:
    """Raise DataError for content that failed downloads leave in place of a file."""
    head = content[:512].lstrip().lower()
    if not content:
        raise DataError(f"{path} is empty: its download failed")
    if head.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise DataError(f"{path} is a web page, not data: its download address is dead")
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{path} is a Git LFS pointer, not data: fetch it with `git lfs pull`")
    if b"\0" in content[:4096]:
        raise DataError(f"{path} holds zero bytes, so it is not text: an archive, a pickle, or UTF-16")
