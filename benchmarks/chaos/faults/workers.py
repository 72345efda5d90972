"""Workers that are alive but do not work properly: stopped, slow, raising, or with a NaN gradient."""

import signal
import time
from functools import partial

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.kills import signalled, struck
from benchmarks.chaos.run import ChaosError, Run, Snapshot

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
