"""Allows one command at a time at an address of an object store: an object names the holder and is renewed by it.

The address is that of a run or of an output of `prepare`. Arrow's clients have no conditional write. If two commands
start at the same moment on two hosts, both may start; the one whose object was overwritten notices at its next renewal
and stops. `settle_seconds` closes this gap unless a store takes that long to write the object. A holder that cannot
renew for a minute may lose its place. For a run, the lock of
its folder (common/lock.py) is taken first and has no such gap on one host.

Only the store's clock counts: the age of the object is the time from its last change to the writing of a second object.
So hosts with different clocks get the same result.
"""

import math
import secrets
import time
from collections.abc import Callable
from typing import Self

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.lock import LOCK, Holder, RunLockedError, is_alive, read_holder, refusal, this_process
from declutr.common.stores.address import child
from declutr.common.stores.files import modified, read_file, remove_file, write_file
from declutr.common.stores.retry import RetryPolicy
from declutr.common.watcher import Watcher

_BEAT_SECONDS = 10.0
_ONCE = RetryPolicy(total_seconds=0.0)


class Lease(Watcher):
    """Holds an address while its block runs.

    Args:
        address: address of a run or of an output.
        lost: called from a thread when another command has taken over the address.
        beat_seconds: time between two renewals.
        settle_seconds: time after which the object is read again on entering; 0 leaves this out. Of several commands
            that start at once, the last writer stays.

    Raises:
        RunLockedError: on entering, a running command holds the address.
        RemoteError: on entering, the store refuses or does not answer.
    """

    def __init__(
        self,
        address: str,
        lost: Callable[[], None],
        beat_seconds: float = _BEAT_SECONDS,
        settle_seconds: float = 0.0,
    ) -> None:
        super().__init__(beat_seconds, "declutr-lease")
        self._settle_seconds = settle_seconds
        self._address, self._url, self._lost = address, child(address, LOCK), lost
        self._holder = this_process(secrets.token_hex(8))

    def __enter__(self) -> Self:
        holder = self._read(RetryPolicy())
        if holder is not None and is_alive(holder, self._age_seconds):
            raise self._refused(holder)
        self._write(RetryPolicy())
        if self._settle_seconds:
            time.sleep(self._settle_seconds)
            holder = self._read(RetryPolicy())
            if holder is not None and holder.token != self._holder.token:
                raise self._refused(holder)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        try:
            if self._mine():
                remove_file(self._url, _ONCE)
        except OSError as error:
            get_logger().warning("%s cannot be deleted (%s); it locks the run for one more minute", self._url, error)

    def look(self) -> bool:
        """Renews the lease; False when it is lost."""
        try:
            if not self._mine():
                self._lost()
                return False
            self._write(_ONCE)
        except OSError as error:  # the next call may succeed
            get_logger().debug("%s cannot be renewed: %s", self._url, error)
        return True

    def _refused(self, holder: Holder) -> RunLockedError:
        return RunLockedError(
            f"{refusal(self._address, holder)}; wait until it ends (a minute if its host is gone), or name another "
            "address"
        )

    def _mine(self) -> bool:
        holder = self._read(_ONCE)
        return holder is not None and holder.token == self._holder.token

    def _read(self, retries: RetryPolicy) -> Holder | None:
        return read_holder(read_file(self._url, retries) or b"", self._url)

    def _write(self, retries: RetryPolicy) -> None:
        content = msgspec.structs.asdict(self._holder) | {"beat": time.time()}
        write_file(self._url, msgspec.json.encode(content), retries)

    def _age_seconds(self) -> float:
        """Seconds since the lease was renewed, on the store's clock; infinite if it has been released."""
        clock = child(self._address, f".{LOCK}.{self._holder.token}")
        write_file(clock, b"{}", RetryPolicy())
        try:
            now, renewed = modified(clock), modified(self._url)
        finally:
            remove_file(clock, _ONCE)
        return math.inf if now is None or renewed is None else now - renewed
