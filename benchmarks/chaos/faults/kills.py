"""Dying processes: workers, the controller, the command itself."""

import dataclasses
import signal
import time
from functools import partial

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.run import ChaosError, Run, Snapshot
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.driver.exported import EXPORT

_QUICKLY = 0.0005  # seconds between two looks for a moment that is soon over


def struck(snapshot: Snapshot, seconds: float) -> Snapshot:
    """Return the snapshot with the actual moment of the fault."""
    return dataclasses.replace(snapshot, seconds=seconds)


def signalled(run: Run, number: int) -> Snapshot:
    """Send a signal to the last worker in the middle of a step."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    return struck(snapshot, run.kill(victim, number))


def worker_saving(run: Run) -> Snapshot:
    """Kill rank 0 with SIGKILL while the files of a checkpoint are being written."""
    victim = run.workers()[0]
    folder = run.folder / CHECKPOINTS
    snapshot = run.snapshot()
    run.wait_for("a checkpoint being written", lambda: any(folder.glob(".step-*")), every_seconds=_QUICKLY)
    struck_at = run.kill(victim)
    return struck(dataclasses.replace(snapshot, lines=run.lines()), struck_at)


def controller(run: Run) -> Snapshot:
    """Kill Ray Train's actor between the command and the workers with SIGKILL."""
    (victim,) = run.census.titled("TrainController")
    starts, snapshot = run.starts, run.snapshot()
    snapshot = struck(snapshot, run.kill(victim))
    run.wait_for("the command to notice", lambda: run.over or run.snapshot().inode != snapshot.inode, 180, ended=True)
    if run.over:
        run.start()
    assert run.starts - starts <= 1
    return snapshot


def driver(run: Run, number: int) -> Snapshot:
    """Send a signal to the command; the user repeats it after its end."""
    assert run.driver is not None
    run.workers()
    snapshot = run.snapshot()
    run.driver.send_signal(number)
    snapshot = struck(snapshot, time.time())
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
    snapshot = struck(snapshot, time.time())
    run.wait()
    if (run.folder / EXPORT).exists():
        raise ChaosError("the encoder was complete before the command could be killed")
    run.start()
    run.wait()
    run.ended = time.time()
    return snapshot


FAULTS = (
    Fault("worker_killed", partial(signalled, number=signal.SIGKILL), "worker 1 .*died"),
    Fault("worker_killed_while_saving", worker_saving, "worker .* died"),
    Fault(
        "worker_terminated",
        partial(signalled, number=signal.SIGTERM),
        r"saved at step \d+ after SIGTERM to worker \d+ \(",
    ),
    Fault("controller_killed", controller, "coordinates the workers died"),
    Fault("driver_terminated", partial(driver, number=signal.SIGTERM), r"stopped at step \d+ of \d+ after SIGTERM"),
    Fault("driver_killed", partial(driver, number=signal.SIGKILL), r"continuing after step \d+ of"),
    Fault("driver_killed_exporting", exporting, "finished already|encoder in", trains=False),
)
