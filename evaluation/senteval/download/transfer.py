"""One file over HTTP, resumable: what has come stays in a `.part` beside it and the next call goes on from there."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from common.storage import fsync_path, write_json

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_ATTEMPTS = 3


class TransferError(OSError):
    """A file that could not be fetched whole."""


def fetch(url: str, target: Path, max_bytes: int, verify: Callable[[Path], None] | None = None) -> int:
    """Fetches `url` to `target`, whole or not at all; returns the number of bytes that came over the network.

    A connection that breaks is taken up where it broke, three times; then the part is left for the next call. The
    server is asked to go on only with the very same content (`If-Range`), else it starts anew.

    Args:
        url: http or https.
        target: takes the file when it is complete.
        max_bytes: more than that is refused.
        verify: raises ValueError for a file that is not the right one; its part is then removed.

    Raises:
        TransferError: not found, too large, broken off three times, or not the right file.
    """
    part, notes = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    received, last = 0, ""
    for _ in range(_ATTEMPTS):
        try:
            more, complete = _go_on(url, part, notes, max_bytes)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TransferError):  # too much, or not what was asked for: no part to go on from
                part.unlink(missing_ok=True)
                notes.unlink(missing_ok=True)
                raise
            if isinstance(error, urllib.error.HTTPError) and error.code != 416:
                raise TransferError(f"{url}: {error.code} {error.reason}") from error
            if isinstance(error, urllib.error.HTTPError):  # the part is longer than the file: begin anew
                part.unlink(missing_ok=True)
            last = str(error)
            continue
        received += more
        if complete:
            break
        last = f"the connection ended after {part.stat().st_size:,} bytes"
    else:
        raise TransferError(f"{url}: {last}; the same command goes on from there")
    try:
        if verify is not None:
            verify(part)
    except ValueError as error:
        part.unlink()
        notes.unlink(missing_ok=True)
        raise TransferError(f"{url}: {error}") from error
    fsync_path(part)
    part.replace(target)
    notes.unlink(missing_ok=True)
    fsync_path(target.parent)
    return received


def _go_on(url: str, part: Path, notes: Path, max_bytes: int) -> tuple[int, bool]:
    """One connection; returns the bytes it brought and whether the file is now complete."""
    request = urllib.request.Request(url, headers={"User-Agent": "declutr", "Accept-Encoding": "identity"})
    there = part.stat().st_size if part.exists() else 0
    stamp = json.loads(notes.read_text(encoding="utf-8"))["stamp"] if there and notes.exists() else ""
    if stamp:
        request.add_header("Range", f"bytes={there}-")
        request.add_header("If-Range", stamp)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {there}-")
        if answer.status == 206 and not resumed:
            raise TransferError(f"{url}: the server answered {answer.headers.get('Content-Range')!r}, asked {there}-")
        start = there if resumed else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        if total is not None and total > max_bytes:
            raise TransferError(f"{url}: {total:,} bytes, more than the {max_bytes:,} that are expected at most")
        tag = answer.headers.get("ETag", "")
        write_json(
            notes, {"stamp": tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")}
        )
        size = start
        with part.open("ab" if resumed else "wb") as stream:
            while chunk := answer.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > max_bytes:
                    raise TransferError(f"{url}: more than the {max_bytes:,} bytes that are expected at most")
                stream.write(chunk)
    return size - start, total is None or size == total
