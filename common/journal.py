"""A file that grows by whole pieces, each there exactly once, whatever the storage does in between."""

import os
import threading
from pathlib import Path


class Journal:
    """Pieces are added in memory and flushed to a file that exists; a flush that failed is simply repeated.

    The file is written at known places, so what a failed flush left behind it is written over. It is open only during a
    flush: a file system that was gone and came back has no handle of ours to be stale. Threads may share it.

    Args:
        path: of the file; pieces are added behind what it holds now.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable = path.stat().st_size
        """Bytes that an fsync has confirmed: from there on the journal can write everything again."""
        self._written = self._durable
        self._pieces = bytearray()
        """Everything behind `_durable`."""
        self._adding = threading.Lock()
        self._flushing = threading.Lock()

    def add(self, piece: bytes) -> None:
        """Adds a piece; never waits for the storage."""
        with self._adding:
            self._pieces += piece

    def flush(self, to_disk: bool = False) -> None:
        """Writes what was added.

        Args:
            to_disk: also force it to the disk.

        Raises:
            OSError: nothing is lost; the next flush begins anew.
        """
        with self._flushing:
            with self._adding:
                new = bytes(self._pieces[self._written - self._durable :])
            if not new and (not to_disk or self._written == self._durable):
                return
            handle = os.open(self.path, os.O_WRONLY)  # not created anew: its beginning would be missing
            try:
                done = 0
                while done < len(new):
                    done += os.pwrite(handle, new[done:], self._written + done)
                if to_disk:
                    os.fsync(handle)
            except OSError:
                self._written = self._durable  # after a failed fsync nobody knows what is there
                raise
            finally:
                os.close(handle)
            self._written += len(new)
            if to_disk:
                with self._adding:
                    del self._pieces[: self._written - self._durable]
                    self._durable = self._written
