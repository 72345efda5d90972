"""Workers that are alive but do not work properly: stopped, slow, raising, or with a NaN gradient."""

import signal
import time
from functools import partial

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.kills import signalled, struck
from benchmarks.chaos.run import ChaosError, Mark, Run

_SLOW_SECONDS = 20.0
_NAN = """
import trainer.step.step
whole = trainer.step.step.Stepper.gradients
def poisoned(self, batch, step):
    found = whole(self, batch, step)
    if {first} <= step < {end}:
        next(p for group in self.optimizer.param_groups for p in group["params"]).grad.fill_(float("nan"))
    return found
trainer.step.step.Stepper.gradients = poisoned
"""
_RAISE = """
import trainer.step.step
def broken(self, batch, step):
    raise OSError("chaos: the device does not answer")
trainer.step.step.Stepper.gradients = broken
"""


def raising(run: Run) -> Mark:
    """Raise an exception in the step of the last worker."""
    victim = run.workers()[-1]
    mark = run.mark()
    run.execute(victim, _RAISE)
    return struck(mark, time.time())


def slow(run: Run) -> Mark:
    """Give the last worker a ninth of its time for a while: the run slows down, and the worker is named."""
    victim = run.workers()[-1]
    mark = run.mark()
    begun = time.time()
    while time.time() < begun + _SLOW_SECONDS:
        run.kill(victim, signal.SIGSTOP)
        time.sleep(0.4)
        run.kill(victim, signal.SIGCONT)
        time.sleep(0.05)
    if run.mark().inode != mark.inode:
        raise ChaosError("the workers were restarted because one was slow")
    return struck(mark, begun)


def poison(run: Run, steps: int) -> Mark:
    """Put NaN into the last worker's gradient for that many steps."""
    victim = run.workers()[-1]
    mark = run.mark()
    first = mark.step + 60
    run.execute(victim, _NAN.format(first=first, end=first + steps))
    run.wait_for("the bad step", lambda: run.last_step() >= first - 1, ended=True)
    return run.mark()


def nan_stops(run: Run, steps: int, seconds: float, problem: str) -> Mark:
    """Put NaN into one worker's gradient; the run stops, and the same command continues from the last checkpoint."""
    mark = poison(run, steps)
    if run.wait(seconds) == 0:
        raise ChaosError(f"the command ended with status 0 {problem}")
    run.start()
    return mark


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
