"""Runs that are told to skip a step whose loss or gradient is not a number, up to a bound."""

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.workers import poison
from benchmarks.chaos.run import ChaosError, Mark, Run

_FOR_EVER = 10**9


def nan_skipped(run: Run) -> Mark:
    """NaN in one worker's gradient at two steps: they change nothing, the run goes on."""
    return poison(run, 2)


def nan_without_end(run: Run) -> Mark:
    """NaN at every step: the run must not skip for ever. The same command continues from what was saved before."""
    mark = poison(run, _FOR_EVER)
    if run.wait(90) == 0:
        raise ChaosError("the command ended with status 0 though no step could be taken")
    run.start()
    return mark


_SKIP = {"on_bad_loss": "skip"}
FAULTS = (
    Fault("nan_skipped", nan_skipped, "skip", "skip", restarts=False, alters=True, changes=_SKIP),
    Fault("nan_without_end", nan_without_end, "skip", "skip", alters=True, changes=_SKIP),
)
