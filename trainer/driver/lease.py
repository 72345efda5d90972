"""One command a run in an object store: an object that says who works on it, renewed while it does.

Arrow's clients cannot write on a condition. So of two commands that begin within the same moment on two hosts both may
begin; the one whose name was written over finds out when it renews, and ends. A holder that cannot renew for a minute
may lose its run to another in the same way. On one host `common/lock.py` comes first, and has no such gap.

Only the store's clock is asked: the age of the object is the time between its last change and that of an object that is
written to be compared with it, so hosts whose clocks differ judge alike.
"""

import math
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from common.console.logs import get_logger
from common.lock import LOCK, Holder, RunLockedError, lives, read_holder, refusal, this_process
from common.stores.address import child
from common.stores.files import modified, read_file, remove_file, write_file
from common.stores.retry import RetryPolicy

_BEAT_SECONDS = 10.0
_ONCE = RetryPolicy(total_seconds=0.0)


class Lease:
    """Holds a run in a store while its block runs.

    Args:
        address: of the run.
        lost: called, from a thread, when another command has taken the run over.
        beat_seconds: between two renewals.

    Raises:
        RunLockedError: on entering, when a living command holds it.
        RemoteError: on entering, when the store refuses or does not answer.
    """

    def __init__(self, address: str, lost: Callable[[], None], beat_seconds: float = _BEAT_SECONDS) -> None:
        self._address, self._url = address, child(address, LOCK)
        self._lost, self._beat_seconds = lost, beat_seconds
        self._holder = this_process(secrets.token_hex(8))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="declutr-lease")

    def __enter__(self) -> "Lease":
        holder = self._read(RetryPolicy())
        if holder is not None and lives(holder, self._age_seconds):
            raise RunLockedError(
                f"{refusal(self._address, holder)}; wait for it (a minute, if its host is gone) or name another address"
            )
        self._write(RetryPolicy())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        try:
            if self._mine():
                remove_file(self._url, _ONCE)
        except OSError as error:
            get_logger().warning("%s cannot be taken away (%s); it counts for a minute more", self._url, error)

    def _beat(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            try:
                if not self._mine():
                    self._lost()
                    return
                self._write(_ONCE)
            except OSError as error:  # the next one may get through
                get_logger().debug("%s cannot be renewed: %s", self._url, error)

    def _mine(self) -> bool:
        holder = self._read(_ONCE)
        return holder is not None and holder.token == self._holder.token

    def _read(self, patience: RetryPolicy) -> Holder | None:
        return read_holder(read_file(self._url, patience) or b"", self._url)

    def _write(self, patience: RetryPolicy) -> None:
        content = msgspec.structs.asdict(self._holder) | {"beat": time.time()}
        write_file(self._url, msgspec.json.encode(content), patience)

    def _age_seconds(self) -> float:
        """Seconds since the lease was renewed, on the store's clock; infinite where it was given up meanwhile."""
        clock = child(self._address, f".{LOCK}.{self._holder.token}")
        write_file(clock, b"{}", RetryPolicy())
        try:
            now, renewed = modified(clock), modified(self._url)
        finally:
            remove_file(clock, _ONCE)
        return math.inf if now is None or renewed is None else now - renewed
