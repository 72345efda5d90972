"""Folders and files that this process may not read, for tests that run as root, too."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read everything, so this takes the rights of another user for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder that every user may read; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        yield folder
        for path in [folder, *folder.rglob("*")]:  # so that whoever made it can remove it
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
