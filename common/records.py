"""Small JSON files of ours that are read back: each has the shape it was written with, or is named as damaged."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

Record = TypeVar("Record")


class DamagedError(ValueError):
    """A file of ours that does not hold what we write into it."""


def read_record(path: Path, kind: type[Record]) -> Record:
    """Reads a JSON file.

    Args:
        path: of the file.
        kind: type of its content; members of a struct that it does not name are left out.

    Raises:
        DamagedError: its content is something else: nothing, half of it, other types.
        OSError: there is no such file, or it cannot be read.
    """
    return decode_record(path.read_bytes(), kind, str(path))


def decode_record(raw: bytes, kind: type[Record], name: str) -> Record:
    """As `read_record`, of bytes that were read from the place `name`.

    Raises:
        DamagedError: as `read_record`.
    """
    if not raw.strip():
        raise DamagedError(f"{name} is damaged: it is empty")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedError(f"{name} is damaged: {error}") from error


def convert_record(value: Any, kind: type[Record], name: str) -> Record:
    """As `read_record`, of JSON that was decoded already.

    Raises:
        DamagedError: as `read_record`.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise DamagedError(f"{name} is damaged: {error}") from error
