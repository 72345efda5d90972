"""Checksums of a checkpoint's files, without torch."""

import hashlib
from pathlib import Path

import xxhash

XXH3 = "xxh3:"
"""Prefix of checksums by XXH3."""


def has_checksum(path: Path, checksum: str) -> bool:
    """Compares a file with its checksum. One without a prefix is SHA-256, from older checkpoints.

    Raises:
        OSError: the storage failed.
    """
    kind = xxhash.xxh3_128 if checksum.startswith(XXH3) else hashlib.sha256
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, kind).hexdigest() == checksum.removeprefix(XXH3)
