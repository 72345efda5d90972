"""Resumable download of one file over HTTP: received bytes stay in a `.part` next to it until it is complete."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from declutr.common.storage import fsync_path, write_json

_CHUNK_BYTES = 1 << 20
_TIMEOUT_SECONDS = 60
_ATTEMPTS = 3


class TransferError(OSError):
    """A file that could not be fetched completely."""


def fetch(url: str, target: Path, max_bytes: int, verify: Callable[[Path], None] | None = None) -> int:
    """Fetch `url` (http or https) to `target`, completely or not at all; return the number of bytes received.

    A broken connection is resumed; after three attempts the part is left for the next call. The server is asked to
    resume only if the content is unchanged (`If-Range`); otherwise the download restarts.

    `verify` raises ValueError for a wrong file, whose part is then removed.

    Raises:
        TransferError: the file was not found, is too large, broke off three times, or is wrong.
    """
    part, notes = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    received, last = 0, ""
    for _ in range(_ATTEMPTS):
        try:
            more, complete = _go_on(url, part, notes, max_bytes)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, TransferError):  # too much data, or a wrong range: the part cannot be resumed
                part.unlink(missing_ok=True)
                notes.unlink(missing_ok=True)
                raise
            if isinstance(error, urllib.error.HTTPError) and error.code != 416:
                raise TransferError(f"{url}: {error.code} {error.reason}") from error
            if isinstance(error, urllib.error.HTTPError):  # the part is longer than the file: restart
                part.unlink(missing_ok=True)
            last = str(error)
            continue
        received += more
        if complete:
            break
        last = f"the connection ended after {part.stat().st_size:,} bytes"
    else:
        raise TransferError(f"{url}: {last}; run the same command to resume")
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
    """Make one connection; return the bytes received and whether the file is now complete."""
    request = urllib.request.Request(url, headers={"User-Agent": "declutr", "Accept-Encoding": "identity"})
    there = part.stat().st_size if part.exists() else 0
    stamp = json.loads(notes.read_text(encoding="utf-8"))["stamp"] if there and notes.exists() else ""
    if stamp:
        request.add_header("Range", f"bytes={there}-")
        request.add_header("If-Range", stamp)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
        resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {there}-")
        if answer.status == 206 and not resumed:
            raise TransferError(f"{url}: server sent range {answer.headers.get('Content-Range')!r}, asked for {there}-")
        start = there if resumed else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        if total is not None and total > max_bytes:
            raise TransferError(f"{url}: {total:,} bytes exceed the limit of {max_bytes:,}")
        tag = answer.headers.get("ETag", "")
        write_json(
            notes, {"stamp": tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")}
        )
        size = start
        with part.open("ab" if resumed else "wb") as stream:
            while chunk := answer.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > max_bytes:
                    raise TransferError(f"{url}: exceeds the limit of {max_bytes:,} bytes")
                stream.write(chunk)
    return size - start, total is None or size == total
