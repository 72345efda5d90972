"""Runs configured to skip a step whose loss or gradient is NaN, up to a limit."""

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.workers import poison
from benchmarks.chaos.run import ChaosError, Mark, Run

_FOR_EVER = 10**9


def nan_skipped(run: Run) -> Mark:
    """Put NaN into one worker's gradient at two steps: nothing is updated, and the run continues."""
    return poison(run, 2)


def nan_without_end(run: Run) -> Mark:
    """Put NaN at every step: the run must stop skipping. The same command continues from the last checkpoint."""
    mark = poison(run, _FOR_EVER)
    if run.wait(90) == 0:
        raise ChaosError("the command ended with status 0 although no step could be taken")
    run.start()
    return mark


_SKIP = {"on_bad_loss": "skip"}
FAULTS = (
    Fault("nan_skipped", nan_skipped, "skip", "skip", restarts=False, alters=True, changes=_SKIP),
    Fault("nan_without_end", nan_without_end, "skip", "skip", alters=True, changes=_SKIP),
)
