"""Damaged or missing files: checkpoints, shards, a full disk, unreachable storage."""

import errno
import os
import subprocess
import time
from pathlib import Path

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.processes import struck
from benchmarks.chaos.run import ChaosError, Run, Snapshot
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in


def _stop(run: Run) -> Snapshot:
    """Kill the command with SIGKILL and wait until its workers have ended too."""
    assert run.driver is not None
    run.workers()
    snapshot = run.snapshot()
    run.driver.kill()
    run.driver.wait()
    snapshot = struck(snapshot, time.time())
    gone = "the workers to end without their command"
    run.wait_for(gone, lambda: not run.census.titled("RayTrainWorker"), 30, ended=True, every_seconds=0.1)
    return snapshot


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))


def broken_checkpoints(run: Run) -> Snapshot:
    """Truncate the newest checkpoint, flip a bit in the second, and leave the third half-written."""
    folder = run.folder / CHECKPOINTS
    run.wait_for("four checkpoints: three to break, one to resume from", lambda: len(steps_in(folder)) >= 4)
    snapshot = _stop(run)
    newest, second, third = (folder / f"step-{step:08d}" for step in reversed(steps_in(folder)[-3:]))
    with (newest / "encoder.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    flip(second / "optimizer.safetensors")
    (third / "state.json").unlink()
    run.start()
    run.wait_for("words on the broken ones", lambda: all(p.name in run.said(snapshot) for p in (newest, second, third)))
    return snapshot


def changed_shard(run: Run) -> Snapshot:
    """Flip a bit of a shard between two commands, which must be refused; restore it, and training continues."""
    snapshot = _stop(run)
    folder = Path(run.values["data"])
    path = folder / load_manifest(folder).shards[0].name
    before = path.stat()
    flip(path)
    try:
        run.start()
        status = run.wait()
    finally:
        flip(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if status != 1 or path.name not in run.said(snapshot):
        raise ChaosError(f"status {status}: a changed shard was not refused")
    run.start()
    return snapshot


def full_disk(run: Run) -> Snapshot:
    """Fill the run's disks to the last byte while checkpoints are due; free the space later."""
    run.workers()
    snapshot = run.snapshot()
    fillers = [folder / "filler" for folder in (run.folder / CHECKPOINTS, run.folder)]
    try:
        for filler in fillers:
            _fill(filler)
        snapshot = struck(snapshot, time.time())
        run.wait_for("a message about the full disk", lambda: "No space left" in run.said(snapshot), 60, ended=True)
    finally:
        for filler in fillers:
            filler.unlink(missing_ok=True)
    return _continue(run, snapshot)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream:
        for size in (2**20, 2**12, 1):
            try:
                while True:
                    stream.write(b"0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def storage_away(run: Run) -> Snapshot:
    """Make the file system of the checkpoints refuse every write for a while."""
    run.workers()
    folder = run.folder / CHECKPOINTS
    snapshot = run.snapshot()
    remount = ["mount", "-o", "remount,ro", str(folder)]  # fails while a file is being written there

    def read_only() -> bool:
        return subprocess.run(remount, capture_output=True, check=False).returncode == 0

    run.wait_for(f"{folder} to be read-only", read_only, 60, ended=True, every_seconds=0.003)
    snapshot = struck(snapshot, time.time())
    try:
        time.sleep(run.away_seconds)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    return _continue(run, snapshot)


def _continue(run: Run, snapshot: Snapshot) -> Snapshot:
    """Repeat the command if it has ended, and wait for a new checkpoint."""
    if run.over:
        run.start()
    newest = run.newest_checkpoint()
    run.wait_for("a new checkpoint", lambda: run.newest_checkpoint() > newest, 120, ended=True)
    return snapshot


FAULTS = (
    Fault("broken_checkpoints", broken_checkpoints, "skipping a broken checkpoint"),
    Fault("changed_shard", changed_shard, "is damaged: SHA-256"),
    Fault("disk_full", full_disk, "No space left", restarts=False, needs_root=True),
    Fault("storage_away", storage_away, "Read-only file system", restarts=False, needs_root=True),
)
