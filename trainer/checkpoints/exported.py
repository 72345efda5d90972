"""The settings of an exported encoder, without torch."""

from pathlib import Path
from typing import Any

import msgspec

from declutr.common.errors import DamagedError
from declutr.common.storage import hash_json, read_record

EXPORT = "export"
SETTINGS = "declutr.json"
A_PATH = "(a path)"
"""Stands for a path or an address in the settings of an export, which others get."""


class ExportSettings(msgspec.Struct, frozen=True):
    """The part of an export's settings that is read back."""

    step: int
    """Step of the exported checkpoint."""
    pooling: str
    verdict: dict[str, Any]
    """Comparison with the start of the run (trainer/driver/export.py)."""
    checkpoint: str
    """Hash of that checkpoint's state, which has the checksums of its files."""
    config: dict[str, Any]
    """Settings of the run, without paths and addresses."""
    files: dict[str, str]
    """SHA-256 of every other file of the folder."""


def read_settings(folder: Path) -> ExportSettings:
    """Reads the settings of an exported encoder.

    Raises:
        DamagedError: the file is damaged.
        OSError: the file is missing or cannot be read.
    """
    settings = read_record(folder / SETTINGS, ExportSettings)
    raw = read_record(folder / SETTINGS, dict[str, Any])
    if raw.pop("hash", None) != hash_json(raw):
        raise DamagedError(f"{folder / SETTINGS} is altered (its hash differs)")
    return settings
