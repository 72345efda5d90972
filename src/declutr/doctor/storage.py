"""Check that a run can use a folder: writable by every node, visible to all, atomic renames, enough space."""

import contextlib
import shutil
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from declutr.common.paths import expand, expand_known
from declutr.common.storage import fsync_path
from declutr.common.stores.address import filesystem, is_remote
from declutr.doctor.facts import nearest_existing
from declutr.doctor.finding import EVERYWHERE, Finding, make_finding

SEEN_SECONDS = 10.0
_SLOW_SECONDS = 2.0
_SYNC_LIMIT_MS = 100.0
_SYNCS = 5
_REPLACES = 50


@dataclass(frozen=True)
class Written:
    """Result of one node's tests in a folder.

    Attributes:
        folder: folder of the tests: the path, or its nearest existing parent.
        error: reason why it could not write; empty if it could.
        free_bytes: free space; None for an address, which has no known limit.
        sync_ms: median time to force 4 KiB to the disk, in milliseconds; None for an address.
        torn: reads that found a file missing or incomplete while it was replaced.
    """

    folder: str
    error: str = ""
    free_bytes: int | None = None
    sync_ms: float | None = None
    torn: int = 0


def located(path: str) -> str:
    """Path as a run passes it to its workers: absolute; variables unknown here are left to the nodes."""
    if is_remote(path):
        return path
    expanded = expand_known(path)
    return str(expanded) if str(expanded).startswith("$") else str(expanded.absolute())


def standing(path: str) -> str:
    """Find the path, or its nearest existing parent, because a run creates missing folders."""
    here = expand_known(path)
    if is_remote(path) or str(here).startswith("$"):
        return path
    return str(nearest_existing(here))


def write(path: str, mark: str, node: str) -> Written:
    """Write this node's mark into the folder, and test there what checkpoints rely on.

    Args:
        path: answer of `standing` on one machine, so that all nodes test the same folder.
        mark: name of the folder for the marks, one per check.
        node: name of this node.
    """
    folder = path
    try:
        folder = path if is_remote(path) else str(expand(path))
        _write_mark(folder, mark, node)
        if is_remote(folder):
            return Written(folder)
        own = Path(folder) / mark / f"of-{_safe(node)}"
        own.mkdir()
        return Written(
            folder, free_bytes=shutil.disk_usage(folder).free, sync_ms=_sync_ms(own / "sync"), torn=_torn(own / "whole")
        )
    except (OSError, ValueError, ImportError) as error:
        return Written(folder, f"{type(error).__name__}: {error}")


def _write_mark(folder: str, mark: str, node: str) -> None:
    if not is_remote(folder) and not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} does not exist")
    files, root = _filesystem(folder)
    files.makedirs(f"{root}/{mark}", exist_ok=True)
    with files.open(f"{root}/{mark}/{_safe(node)}", "wb") as stream:
        stream.write(node.encode())


def _filesystem(folder: str) -> tuple[Any, str]:
    files, path, _ = filesystem(folder)
    return files, path.rstrip("/")


def _safe(node: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in node)


def _sync_ms(path: Path) -> float:
    taken = []
    for number in range(_SYNCS):
        path.write_bytes(bytes([number]) * 4096)
        begun = time.perf_counter()
        fsync_path(path)
        taken.append(1000 * (time.perf_counter() - begun))
    return statistics.median(taken)


def _torn(path: Path) -> int:
    """Count reads that find neither the whole old nor the whole new file while a writer replaces it by renaming."""
    contents = (b"a" * 65536, b"b" * 65536)
    path.write_bytes(contents[0])
    done, torn = threading.Event(), 0

    def replace() -> None:
        try:
            for number in range(_REPLACES):
                aside = path.with_name("aside")
                aside.write_bytes(contents[number % 2])
                aside.replace(path)
        finally:
            done.set()

    writer = threading.Thread(target=replace)
    writer.start()
    while not done.is_set():
        try:
            torn += path.read_bytes() not in contents
        except OSError:
            torn += 1
    writer.join()
    return torn


def seen(path: str, mark: str, nodes: list[str], seconds: float = SEEN_SECONDS) -> tuple[list[str], float]:
    """Names of nodes whose marks stay invisible for `seconds`, and the time until all were visible."""
    begun = time.monotonic()
    files, root = _filesystem(path if is_remote(path) else str(expand(path)))
    while True:
        files.invalidate_cache()
        missing = [node for node in nodes if not _reads(files, f"{root}/{mark}/{_safe(node)}", node)]
        waited = time.monotonic() - begun
        if not missing or waited > seconds:
            return missing, waited
        time.sleep(0.1)


def _reads(files: Any, path: str, node: str) -> bool:
    try:
        return bool(files.cat_file(path) == node.encode())
    except OSError:
        return False


def clear(path: str, mark: str, node: str) -> None:
    """Remove this node's files, and the folder of the marks if it is empty; other nodes do the same meanwhile."""
    with contextlib.suppress(OSError, ValueError, ImportError):  # the folder is not empty yet, or removed already
        files, root = _filesystem(path if is_remote(path) else str(expand(path)))
        for left in (f"{root}/{mark}/{_safe(node)}", f"{root}/{mark}/of-{_safe(node)}"):
            if files.exists(left):
                files.rm(left, recursive=True)
        files.rmdir(f"{root}/{mark}")


def check(path: str, found: dict[str, Written], needed_bytes: int) -> list[Finding]:
    """Judge the nodes' tests in a folder; `needed_bytes` is the maximum size of a run's files, 0 if unknown."""
    findings = []
    for node, one in found.items():
        if one.error:
            remedy = "mount or create it on this node, writable for this user"
            findings.append(make_finding(f"{path} writable", node, one.error, fail=True, remedy=remedy))
            continue
        findings.append(make_finding(f"{path} writable", node, one.folder))
        if one.sync_ms is not None:
            findings.append(
                make_finding(
                    f"{path} fsync", node, f"{one.sync_ms:.1f} ms", limit=f"{_SYNC_LIMIT_MS:.0f} ms",
                    warn=one.sync_ms > _SYNC_LIMIT_MS,
                    remedy="checkpoints and shards wait for the disk several times each; use a faster disk for `run`",
                )
            )  # fmt: skip
            findings.append(
                make_finding(
                    f"{path} rename", node, f"{one.torn} torn reads" if one.torn else "whole", fail=one.torn > 0,
                    remedy="renames are not atomic here, so half-written checkpoints could be read; use another disk",
                )
            )  # fmt: skip
    return findings + _check_space(path, found, needed_bytes)


def _check_space(path: str, found: dict[str, Written], needed_bytes: int) -> list[Finding]:
    free = {node: one.free_bytes for node, one in found.items() if one.free_bytes is not None}
    if not free:
        return []
    node, least = min(free.items(), key=lambda item: item[1])
    needed = f"{needed_bytes / 2**30:.2f} GiB for the checkpoints" if needed_bytes else ""
    short = needed_bytes > 0 and least < needed_bytes
    remedy = "free space there, use another folder, lower checkpoint.keep_last, or raise keep_every_steps"
    limit = needed and f"needs {needed}"
    value = f"{least / 2**30:.2f} GiB free"
    tight = needed_bytes > 0 and least < 2 * needed_bytes
    return [make_finding(f"{path} space", node, value, limit=limit, fail=short, warn=tight, remedy=remedy)]


def check_shared(path: str, unseen: dict[str, tuple[list[str], float]]) -> Finding:
    """Check that all nodes see the files of every node."""
    name, limit = f"{path} shared", f"within {SEEN_SECONDS:.0f} s"
    blind = [f"{node} does not see {', '.join(missing)}" for node, (missing, _) in unseen.items() if missing]
    if blind:
        return make_finding(
            name, EVERYWHERE, "; ".join(blind), limit=limit, fail=True,
            remedy="the nodes use different disks under one name: mount one shared file system there on every node "
            "(NFS, EFS, FSx, Lustre)",
        )  # fmt: skip
    slowest = max((seconds for _, seconds in unseen.values()), default=0.0)
    return make_finding(
        name, EVERYWHERE,
        f"all {len(unseen)} nodes see all files, after at most {slowest:.1f} s" if len(unseen) > 1 else "one node",
        limit=limit if len(unseen) > 1 else "", warn=slowest > _SLOW_SECONDS,
        remedy="the mount caches folders too long (NFS: actimeo, lookupcache); a resume may miss the newest checkpoint",
    )  # fmt: skip
