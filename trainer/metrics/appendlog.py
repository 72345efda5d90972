"""An append-only log: whole records, each written exactly once, although the storage may fail in between."""

import os
import threading
from pathlib import Path


class AppendLog:
    """Records are collected in memory and appended to an existing file; a failed flush can simply be repeated.

    Records are written at known offsets, so the next flush overwrites what a failed flush left. The file is open only
    during a flush, so no handle becomes stale when a file system disappears and comes back. Threads may share it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._durable = path.stat().st_size
        """Bytes that an fsync has confirmed; everything after them can be written again from memory."""
        self._written = self._durable
        self._pieces = bytearray()
        """Records after the first `_durable` bytes."""
        self._adding = threading.Lock()
        self._flushing = threading.Lock()

    def add(self, piece: bytes) -> None:
        """Adds a record; never waits for the storage."""
        with self._adding:
            self._pieces += piece

    def flush(self, to_disk: bool = False) -> None:
        """Writes the records that were added, and with `to_disk` forces them to disk.

        Raises:
            OSError: the storage failed; nothing is lost, and the next flush tries again.
        """
        with self._flushing:
            with self._adding:
                new = bytes(self._pieces[self._written - self._durable :])
            if not new and (not to_disk or self._written == self._durable):
                return
            handle = os.open(self.path, os.O_WRONLY)  # no O_CREAT: a new file would lack the earlier records
            try:
                done = 0
                while done < len(new):
                    done += os.pwrite(handle, new[done:], self._written + done)
                if to_disk:
                    os.fsync(handle)
            except OSError:
                self._written = self._durable  # after a failed fsync the file's content is unknown
                raise
            finally:
                os.close(handle)
            self._written += len(new)
            if to_disk:
                with self._adding:
                    del self._pieces[: self._written - self._durable]
                    self._durable = self._written
