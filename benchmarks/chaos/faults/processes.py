"""Processes that die (workers, controller, command), or live but do not work: stopped, slow, raising, or with NaN."""

import dataclasses
import signal
import time
from functools import partial

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.run import ChaosError, Run, Snapshot
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.exported import EXPORT

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


KILLS = (
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


_SLOW_SECONDS = 20.0
_NAN = """
import declutr.trainer.step.step
whole = declutr.trainer.step.step.TrainStep.gradients
def poisoned(self, batch, step):
    found = whole(self, batch, step)
    if {first} <= step < {end}:
        next(p for group in self.optimizer.param_groups for p in group["params"]).grad.fill_(float("nan"))
    return found
declutr.trainer.step.step.TrainStep.gradients = poisoned
"""
_RAISE = """
import declutr.trainer.step.step
def broken(self, batch, step):
    raise OSError("chaos: the device does not answer")
declutr.trainer.step.step.TrainStep.gradients = broken
"""


def raising(run: Run) -> Snapshot:
    """Raise an exception in the step of the last worker."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    run.execute(victim, _RAISE)
    return struck(snapshot, time.time())


def slow(run: Run) -> Snapshot:
    """Give the last worker a ninth of its time for a while: the run slows down, and the worker is named."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    begun = time.time()
    while time.time() < begun + _SLOW_SECONDS:
        run.kill(victim, signal.SIGSTOP)
        time.sleep(0.4)
        run.kill(victim, signal.SIGCONT)
        time.sleep(0.05)
    if run.snapshot().inode != snapshot.inode:
        raise ChaosError("the workers were restarted because one was slow")
    return struck(snapshot, begun)


def poison(run: Run, steps: int) -> Snapshot:
    """Put NaN into the last worker's gradient for that many steps."""
    victim = run.workers()[-1]
    snapshot = run.snapshot()
    first = snapshot.step + 60
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


_SKIP = {"on_nonfinite_loss": "skip"}
_ONCE = partial(nan_stops, steps=1, seconds=60, problem="after a NaN loss")
_FOR_EVER = partial(nan_stops, steps=10**9, seconds=90, problem="although no step could be taken")
FAULTS = (
    Fault("worker_raises", raising, "the device does not answer"),
    Fault("worker_hung", partial(signalled, number=signal.SIGSTOP), "worker 1 .*hangs"),
    Fault("worker_slow", slow, "worker 1 .*is slow", restarts=False),
    Fault("nan_stops", _ONCE, r"not\s+finite, nothing was updated"),
)
SKIPPING = (
    Fault("nan_skipped", partial(poison, steps=2), "skip", "skip", restarts=False, alters=True, changes=_SKIP),
    Fault("nan_without_end", _FOR_EVER, "skip", "skip", alters=True, changes=_SKIP),
)
"""Runs that skip a step whose loss or gradient is NaN, up to a limit."""
