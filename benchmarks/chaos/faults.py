"""Faults: processes that die or do not work, damaged or missing files, machines that fail, are preempted or join."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.run import ChaosError, Run, Snapshot
from declutr.pipeline.shards.manifest import load_manifest
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.checkpoints.state import EXPORT

_QUICKLY = 0.0005  # seconds between two looks for a moment that is soon over
_SLOW_SECONDS = 20.0  # longer than the watchdog's limit of 15
_AWAY_SECONDS = 30.0  # time for which storage is unreachable
_DEADLINE_SECONDS = 30
_NAN = """
import declutr.trainer.step.step
whole = declutr.trainer.step.step.TrainStep.gradients
def poisoned(self, batch, step, *others):
    sums = whole(self, batch, step, *others)
    if {first} <= step < {end}:
        next(p for group in self.optimizer.param_groups for p in group["params"]).grad.fill_(float("nan"))
    return sums
declutr.trainer.step.step.TrainStep.gradients = poisoned
"""
_RAISE = """
import declutr.trainer.step.step
def broken(self, *_):
    raise OSError("chaos: the device does not answer")
declutr.trainer.step.step.TrainStep.gradients = broken
"""


def struck(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with this moment as that of the fault, which came some time after the snapshot."""
    return dataclasses.replace(snapshot, seconds=time.time())


def signalled(run: Run, number: int) -> Snapshot:
    """Send a signal to the last worker in the middle of a step."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    victim.send_signal(number)
    return snapshot


def worker_saving(run: Run) -> Snapshot:
    """Kill rank 0 with SIGKILL while the files of a checkpoint are being written."""
    victim = run.workers()[0]
    folder = run.folder / CHECKPOINTS
    snapshot = run.snapshot()
    run.wait_for("a checkpoint being written", lambda: any(folder.glob(".step-*")), every_seconds=_QUICKLY)
    victim.kill()
    return dataclasses.replace(struck(snapshot), lines=run.lines())


def controller(run: Run) -> Snapshot:
    """Kill Ray Train's actor between the command and the workers with SIGKILL."""
    (victim,) = run.census.titled("TrainController")
    snapshot = run.snapshot()
    victim.kill()
    run.wait_for("the command to notice", lambda: run.over or run.inode != snapshot.inode, 180, ended=True)
    if run.over:
        run.start()
    return snapshot


def driver(run: Run, number: int) -> Snapshot:
    """Send a signal to the command; the user repeats it after its end."""
    assert run.driver is not None
    run.workers()
    snapshot = run.snapshot()
    run.driver.send_signal(number)
    if run.wait(90) == 0:
        raise ChaosError("the command ended with status 0 although it had not finished")
    run.start()
    return snapshot


def exporting(run: Run) -> Snapshot:
    """Kill the command with SIGKILL while it writes the encoder; the user repeats it."""
    assert run.driver is not None
    run.wait_for("the export", lambda: any(run.folder.glob(f".{EXPORT}.*")), 240, every_seconds=_QUICKLY)
    snapshot = run.snapshot()
    run.driver.kill()
    run.wait()
    if (run.folder / EXPORT).exists():
        raise ChaosError("the encoder was complete before the command could be killed")
    run.start()
    run.wait()
    run.ended = time.time()
    return snapshot


def raising(run: Run) -> Snapshot:
    """Raise an exception in the step of the last worker."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    run.execute(victim, _RAISE)
    return struck(snapshot)


def slow(run: Run) -> Snapshot:
    """Give the last worker a ninth of its time for a while: the run slows down, and no worker is started again."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    while time.time() < snapshot.seconds + _SLOW_SECONDS:
        victim.suspend()
        time.sleep(0.4)
        victim.resume()
        time.sleep(0.05)
    if run.inode != snapshot.inode:  # a restart writes the metrics anew
        raise ChaosError("the workers were restarted because one was slow")
    return snapshot


def poison(run: Run, steps: int) -> Snapshot:
    """Put NaN into the last worker's gradient for that many steps."""
    victim = run.workers()[-1]
    first = run.snapshot().step + 60
    run.execute(victim, _NAN.format(first=first, end=first + steps))
    run.wait_for("the bad step", lambda: run.last_step() >= first - 1, ended=True)
    return run.snapshot()


def nan_stops(run: Run, steps: int, seconds: float, problem: str) -> Snapshot:
    """Put NaN into one worker's gradient; the run stops, and the same command continues from the last checkpoint."""
    snapshot = poison(run, steps)
    if run.wait(seconds) == 0:
        raise ChaosError(f"the command ended with status 0 {problem}")
    run.start()
    return snapshot


def _stop(run: Run) -> Snapshot:
    """Kill the command with SIGKILL and wait until its workers have ended too."""
    assert run.driver is not None
    run.workers()
    snapshot = run.snapshot()
    run.driver.kill()
    run.driver.wait()
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
    run.wait_for(
        "words on the broken ones", lambda: all(p.name in run.messages(snapshot) for p in (newest, second, third))
    )
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
        # a shard that is newer than its manifest is read in full at every start
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if status != 1 or path.name not in run.messages(snapshot):
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
        snapshot = struck(snapshot)
        run.wait_for("a message about the full disk", lambda: "No space left" in run.messages(snapshot), 60, ended=True)
    finally:
        for filler in fillers:
            filler.unlink(missing_ok=True)
    return _continue(run, snapshot)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as stream:
        for size in (2**20, 2**12, 1):  # the last byte, too: a small write would still fit
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
    snapshot = struck(snapshot)
    try:
        time.sleep(_AWAY_SECONDS)
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


def node_killed(run: Run) -> Snapshot:
    """Kill every process of a worker's node at once; a spare node is available."""
    assert run.nodes is not None
    node = run.nodes.with_spare(run.workers()[-1].pid)
    snapshot = run.snapshot()
    run.nodes.remove(node)
    return snapshot


def preempted(run: Run) -> Snapshot:
    """Announce the preemption of a worker's node: a checkpoint within the deadline, then training without the node."""
    assert run.nodes is not None
    node = run.nodes.with_spare(run.workers()[-1].pid)
    before = run.newest_checkpoint()
    snapshot = run.snapshot()
    subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", run.nodes.address),
            *("--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "spot", "--deadline-remaining-seconds", str(_DEADLINE_SECONDS)),
        ],
        env=run.environment,
        check=True,
        capture_output=True,
    )
    run.wait_for("a checkpoint before the deadline", lambda: run.newest_checkpoint() != before, _DEADLINE_SECONDS)
    run.wait_for("workers elsewhere", lambda: run.inode != snapshot.inode, 120)
    run.nodes.remove(node)
    return snapshot


def elastic(run: Run) -> Snapshot:
    """Change the world from 2 workers to 3, 1 and 2, as nodes join and die."""
    assert run.nodes is not None
    first = run.snapshot()
    for size in (3, 1, 2):
        snapshot = run.snapshot()
        if size > len(run.nodes.nodes):
            run.nodes.add(size - len(run.nodes.nodes))
        while size < len(run.nodes.nodes):
            run.nodes.remove(run.nodes.nodes[-1])
        try:
            run.wait_for(f"{size} workers", lambda at=size: len(run.workers()) == at, 180, every_seconds=1)
            run.wait_step(snapshot.step + 1, snapshot)
        except ChaosError as error:
            raise ChaosError(f"{error} (the world should have become {size})") from error
    return first


_SKIP = {"on_nonfinite_loss": "skip"}
_ONCE = partial(nan_stops, steps=1, seconds=60, problem="after a NaN loss")
_FOR_EVER = partial(nan_stops, steps=10**9, seconds=90, problem="although no step could be taken")
_TERMINATED = r"saved at step \d+ after SIGTERM to worker \d+ \("
FAULTS = (
    Fault("worker_raises", raising, "the device does not answer"),
    Fault("worker_hung", partial(signalled, number=signal.SIGSTOP), "worker 1 .*hangs"),
    Fault("worker_slow", slow, "", restarts=False),
    Fault("nan_stops", _ONCE, r"not\s+finite, nothing was updated"),
    Fault("worker_killed", partial(signalled, number=signal.SIGKILL), "worker 1 .*died"),
    Fault("worker_killed_while_saving", worker_saving, "worker .* died"),
    Fault("worker_terminated", partial(signalled, number=signal.SIGTERM), _TERMINATED),
    Fault("controller_killed", controller, "coordinates the workers died"),
    Fault("driver_terminated", partial(driver, number=signal.SIGTERM), r"stopped at step \d+ of \d+ after SIGTERM"),
    Fault("driver_killed", partial(driver, number=signal.SIGKILL), r"continuing after step \d+ of"),
    Fault("driver_killed_exporting", exporting, "finished already|encoder in", trains=False),
    Fault("broken_checkpoints", broken_checkpoints, "skipping a broken checkpoint"),
    Fault("changed_shard", changed_shard, "is damaged: SHA-256"),
    Fault("disk_full", full_disk, "No space left", restarts=False, needs_root=True),
    Fault("storage_away", storage_away, "Read-only file system", restarts=False, needs_root=True),
    # Runs that skip a step whose loss or gradient is NaN, up to a limit.
    Fault("nan_skipped", partial(poison, steps=2), "skip", restarts=False, alters=True, changes=_SKIP),
    Fault("nan_without_end", _FOR_EVER, "skip", alters=True, changes=_SKIP),
    Fault("node_killed", node_killed, "node is gone", setting="cluster"),
    Fault("preemption_notice", preempted, "about to be removed", setting="cluster"),
    # More steps: on a fast machine 900 are over before the third change of the world has been seen.
    Fault("elastic_2_3_1_2", elastic, "node is gone", setting="elastic", steps=1500),
)
