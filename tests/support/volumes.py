"""A storage that really fills up and really becomes read-only: a small tmpfs, where we may mount one."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest


class Volume:
    def __init__(self, path):
        self.path, self._ballast = path, path / "ballast"

    def fill(self, leave_bytes=0):
        with self._ballast.open("wb", buffering=0) as stream:
            free = os.statvfs(self.path)
            left = free.f_bavail * free.f_frsize - leave_bytes
            while left > 0:
                left -= stream.write(bytes(min(left, 2**20)))

    def drain(self):
        self._ballast.unlink()

    def read_only(self, yes):
        option = f"remount,{'ro' if yes else 'rw'}"
        subprocess.run(["mount", "-o", option, str(self.path)], check=True, capture_output=True)


@contextmanager
def small_volume(path, size_mib):
    """Mounts one there; skips the test where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", path]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is refused here ({mounted.stderr.strip()})")
    try:
        yield Volume(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
