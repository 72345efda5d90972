"""Keys and pairs of a search in an object store, for hosts that share no folder."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from declutr.common.paths import expand
from declutr.common.stores.address import child
from declutr.common.stores.files import names, pull_file, push_file
from declutr.common.stores.folders import local_files
from declutr.common.stores.listing import FileRecord
from declutr.common.stores.retry import RetryPolicy

PAIRS = "pairs"
"""Folder of the pairs of the buckets."""
_THREADS = 8


@dataclass(frozen=True)
class Exchange:
    """The store of a search. Each host has one copy of all keys, and sends the pairs that it finds.

    Every method raises RemoteError if the store refuses, or did not answer within `storage_retry_seconds`.
    """

    address: str
    """Folder of the candidates."""
    cache: str
    """Folder for copies, which each host expands."""
    files: Mapping[str, FileRecord]
    """The keys of all units, by name from the address."""
    storage_retry_seconds: float

    @property
    def _retries(self) -> RetryPolicy:
        return RetryPolicy(self.storage_retry_seconds)

    def folder(self) -> Path:
        """This host's copy of the keys, fetched at the first use.

        Raises:
            AlteredError: a file is missing or altered.
        """
        return local_files(self.address, self.files, expand(self.cache).absolute(), self._retries)

    def send(self, pairs: Path) -> None:
        """Sends the pairs of a bucket."""
        push_file(pairs, child(self.address, f"{PAIRS}/{pairs.name}"), self._retries)

    def fetch(self, folder: Path) -> None:
        """Fetches the pairs that the store has and the host does not."""

        def fetch(name: str) -> None:
            pull_file(child(self.address, f"{PAIRS}/{name}"), folder / PAIRS / name, self._retries)

        missing = [
            name for name in names(child(self.address, PAIRS), self._retries) if not (folder / PAIRS / name).exists()
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fetch, missing))
