"""Checksums of a checkpoint's files, without torch."""

import hashlib
from pathlib import Path

import xxhash

XXH3 = "xxh3:"
"""Prefix of checksums by XXH3."""


def has_checksum(path: Path, checksum: str) -> bool:
    """Compares a file with its checksum.

    Raises:
        OSError: the storage failed.
    """
    with path.open("rb") as stream:
        return XXH3 + hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest() == checksum
