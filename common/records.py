"""Small JSON files that the project writes and reads back; a file of another shape is reported as damaged."""

from pathlib import Path
from typing import TypeVar

import msgspec

from declutr.common.storage import read_regular

Record = TypeVar("Record")


class DamagedError(ValueError):
    """A file whose content differs from what the project writes."""


def read_record(path: Path, kind: type[Record]) -> Record:
    """Reads a JSON file whose content has the type `kind`; keys that a struct does not have are ignored.

    Raises:
        DamagedError: the content is empty, cut off, or of another type.
        OSError: the file is missing or cannot be read.
    """
    return decode_record(read_regular(path), kind, str(path))


def decode_record(raw: bytes, kind: type[Record], name: str) -> Record:
    """Like `read_record`, for bytes that were read from the place `name`.

    Raises:
        DamagedError: as `read_record`.
    """
    if not raw.strip():
        raise DamagedError(f"{name} is damaged: it is empty")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedError(f"{name} is damaged: {error}") from error
