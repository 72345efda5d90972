"""A folder at an address: in an object store, on this host (`file://`), or behind another protocol of fsspec.

An object store has no rename. So the list of a folder's files with their SHA-256 and sizes is written last (`commit`).
A folder without this list, or whose files differ from it, is incomplete.

Every method raises RemoteError if the store refuses, or did not answer within `retry_seconds`.
"""

import contextlib
import fcntl
import hashlib
import io
import posixpath
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Any

import msgspec

from declutr.common.errors import AlteredError, RemoteError, redact
from declutr.common.storage import (
    LISTING,
    FileRecord,
    Files,
    atomic_file,
    atomic_folder,
    decoded,
    encoded,
    fsync_path,
    record_of,
    records,
    refuse_names,
)
from declutr.common.stores.address import (
    RETRY_SECONDS,
    Answer,
    bucket_problem,
    child,
    files_below,
    filesystem,
    is_object_store,
    retried,
    short_name,
)

_CHUNK_BYTES = 8 * 2**20
_FETCHES = 8  # parallel fetches, because a store limits the speed of each stream


@dataclass(frozen=True)
class Folder:
    """A folder at an address; names of its files have their folders separated by `/`."""

    url: str  # the address, with its options at the end
    # time after which a request that has no answer is not sent again; 0: it is sent once.
    retry_seconds: float = RETRY_SECONDS

    def at(self, name: str) -> str:
        """Address of a file in the folder."""
        return child(self.url, name) if name else self.url

    def __truediv__(self, name: str) -> "Folder":
        """A folder in this one."""
        return replace(self, url=self.at(name))

    def put(self, name: str, content: Path | bytes) -> None:
        """Writes one file; an object store shows the new content as a whole or not at all."""

        def send(files: Any, place: str) -> None:
            if not is_object_store(files):  # a store would need a request a part
                files.makedirs(posixpath.dirname(place), exist_ok=True)
            try:
                with (
                    io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as source,
                    files.open(place, "wb") as target,
                ):
                    shutil.copyfileobj(source, target, _CHUNK_BYTES)
            except (KeyboardInterrupt, SystemExit):  # leaving the block has completed an object of what was sent so far
                with contextlib.suppress(OSError):
                    files.rm_file(place)
                raise

        self._act(name, send)

    def put_all(self, local: Path, names: Sequence[str]) -> Files:
        """Writes files of a folder of this host, in this order; returns their records."""
        files = {name: record_of(local / name) for name in names}
        for name in names:
            self.put(name, local / name)
        return files

    def read(self, name: str) -> bytes | None:
        """Content of a small file; None if it does not exist."""
        return self._ask(name, lambda files, place: bytes(files.cat_file(place)))

    def fetch(self, name: str, target: Path) -> FileRecord:
        """Copies one file to a temporary place of this host; returns the record of the copy."""

        def copy(files: Any, place: str) -> FileRecord:
            digest, num_bytes = hashlib.sha256(), 0
            with _own_disk(target):
                # Without a buffer, which would be written again on closing and fail as the store's error.
                stream = target.open("wb", buffering=0)
            with stream, files.open(place, "rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    with _own_disk(target):
                        while chunk:
                            chunk = chunk[stream.write(chunk) :]
            with _own_disk(target):
                fsync_path(target)
            return FileRecord(digest.hexdigest(), num_bytes)

        return self._act(name, copy)

    def fetch_all(self, files: Mapping[str, FileRecord | None], target: Path) -> None:
        """Fetches files to a folder of this host, many at once; a record is None if size and checksum are unknown."""
        refuse_names(files, self.url)  # a key of a store may lead out of the folder

        def fetch(name: str) -> None:
            place, expected = target / name, files[name]
            place.parent.mkdir(parents=True, exist_ok=True)
            if self.fetch(name, place) != expected and expected is not None:
                raise AlteredError(f"{self.at(name)} is truncated or altered (checksum differs)")

        with ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(fetch, files))  # `list`: `map` alone raises nothing

    def pull(self, name: str, local: Path) -> bool:
        """Fetches one file and replaces the local one; returns False if the remote file does not exist."""
        facts = self._ask(name, lambda files, place: files.info(place))
        if not facts or facts["type"] != "file":
            return False
        with atomic_file(local) as aside:
            self.fetch(name, aside)
        return True

    def modified(self, name: str) -> float | None:
        """Modification time of a file in Unix seconds of the store's clock; None if the file does not exist."""
        try:
            time = self._ask(name, lambda files, place: files.modified(place))
        except NotImplementedError as error:
            raise RemoteError(f"{self.at(name)}: this store keeps no modification times") from error
        return None if time is None else float(time.replace(tzinfo=time.tzinfo or UTC).timestamp())

    def delete(self, name: str) -> None:
        """Removes a file if it exists."""
        self._ask(name, lambda files, place: files.rm_file(place))

    def clear(self) -> None:
        """Removes everything in the folder, its list first: a rest counts as incomplete if this is stopped."""
        self.delete(LISTING)
        self._ask("", lambda files, place: files.rm(place, recursive=True))

    def kinds(self) -> dict[str, str]:
        """Sorted names directly in the folder, and their kinds ("file", "directory" or a special one).

        None are in a folder that does not exist. A store may have keys with an empty part, whose name is then empty.
        """

        def look(files: Any, place: str) -> dict[str, str]:
            kinds = {str(entry["name"]).rstrip("/"): str(entry["type"]) for entry in files.ls(place, detail=True)}
            own = place.rstrip("/")
            return {"" if name == own else posixpath.basename(name): kind for name, kind in sorted(kinds.items())}

        return self._ask("", look) or {}

    def names(self) -> list[str]:
        """Sorted names of the files and folders directly in the folder; none if it does not exist."""
        return sorted(filter(None, self.kinds()))

    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all files below the folder, by name; none if it does not exist."""

        def look(files: Any, place: str) -> dict[str, int]:
            root = place.rstrip("/") + "/"
            return {name.removeprefix(root): int(facts["size"]) for name, facts in files_below(files, place).items()}

        return self._ask("", look) or {}

    def listing(self) -> Files | None:
        """The files of a complete folder; None if its list is missing."""
        raw = self.read(LISTING)
        return None if raw is None else decoded(raw, self.at(LISTING))

    def is_whole(self) -> bool:
        """Returns True if the folder has its list; its files are not read."""
        return self.listing() is not None

    def commit(self, files: Files) -> None:
        """Marks the folder as complete, with these files."""
        self.put(LISTING, encoded(files))

    def send(self, local: Path) -> int:
        """Sends a folder of this host, its list last; returns the number of files that the store did not have.

        Nothing in the folder may change during the transfer. Other files of an earlier transfer are removed. After an
        error of the store, the remote folder is incomplete.
        """
        new = records(local)
        refuse_names(new, str(local))
        old = self.listing()
        there = self.sizes() if old else {}  # a listed file may have been removed or cut since
        whole = {name: record for name, record in (old or {}).items() if there.get(name) == record.num_bytes}
        if whole == old == new:
            return 0
        if old is not None:  # marks the folder as incomplete until the new list is written
            self.delete(LISTING)
        sent = [name for name in new if whole.get(name) != new[name]]
        for name in sent:
            self.put(name, local / name)
        self.commit(new)
        for name in sorted(set(old or ()) - set(new)):  # after the list: a rest does no harm
            self.delete(name)
        return len(sent)

    def get(self, local: Path, files: Mapping[str, FileRecord] | None = None, renew: bool = False) -> None:
        """Fetches the folder; it gets its name on this host when it is complete and matches its checksums.

        If several processes of a host request the same folder, one of them fetches it and the others wait. An existing
        folder is kept; with `renew`, it is replaced unless it is the same. `files` are some of a folder that need not
        be complete; None: those of its list.
        """
        if local.exists() and not renew:
            return
        files = self._listed() if files is None else files
        local.parent.mkdir(parents=True, exist_ok=True)
        with local.with_name(f".{local.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # another process may have fetched it meanwhile
            if not local.exists() or (renew and records(local) != files):
                with atomic_folder(local, replace=True) as aside:
                    self.fetch_all(files, aside)

    def cached(
        self,
        cache: Path,  # a folder of this host
        files: Mapping[str, FileRecord] | None = None,  # as for `get`
    ) -> Path:
        """This host's copy of the folder, fetched to `cache` at first use; other content gets another copy."""
        files = self._listed() if files is None else files
        local = cache / short_name(self.url, msgspec.json.encode(files, order="sorted"))
        self.get(local, files)
        return local

    def _listed(self) -> Files:
        files = self.listing()
        if files is None:
            raise FileNotFoundError(f"{self.url}: no complete folder found ({LISTING} is missing)")
        return files

    def _act(self, name: str, action: Callable[[Any, str], Answer]) -> Answer:
        """Runs an action, `retried`, on the file system and the path of a file in it; "" stands for the folder."""
        url = self.at(name)
        if problem := bucket_problem(self.url):  # `url` of a folder without a name could be a local path
            raise RemoteError(f"{redact(self.url)}: {problem}")
        files, place, _ = retried(redact(url), 0.0, lambda: filesystem(url))
        try:
            return retried(url, self.retry_seconds, lambda: action(files, place))
        except FileNotFoundError as error:
            raise AlteredError(f"{url}: {error}") from error

    def _ask(self, name: str, action: Callable[[Any, str], Answer]) -> Answer | None:
        """Runs an action like `_act`, without earlier listings; None if the file or folder does not exist."""

        def look(files: Any, place: str) -> Answer | None:
            files.invalidate_cache()
            try:
                return action(files, place)
            except FileNotFoundError:
                return None

        return self._act(name, look)


@contextlib.contextmanager
def _own_disk(target: Path) -> Iterator[None]:
    """Turns errors of this host's disk into RemoteError, because retrying the store does not help."""
    try:
        yield
    except OSError as error:
        raise RemoteError(
            f"{target} cannot be written on this host ({error.strerror}); free disk space and run the command again"
        ) from error
