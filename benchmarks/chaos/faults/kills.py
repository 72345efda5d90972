"""Dying processes: workers, the controller, the command itself."""

import dataclasses
import signal
import time
from functools import partial

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.run import ChaosError, Mark, Run
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.driver.exported import EXPORT

_QUICKLY = 0.0005  # seconds between two looks for a moment that is soon over


def struck(mark: Mark, seconds: float) -> Mark:
    """Return the mark with the actual moment of the fault."""
    return dataclasses.replace(mark, seconds=seconds)


def signalled(run: Run, number: int) -> Mark:
    """Send a signal to the last worker in the middle of a step."""
    victim = run.workers()[-1]
    mark = run.mark()
    return struck(mark, run.kill(victim, number))


def worker_saving(run: Run) -> Mark:
    """Kill rank 0 with SIGKILL while the files of a checkpoint are being written."""
    victim = run.workers()[0]
    folder = run.folder / CHECKPOINTS
    mark = run.mark()
    run.wait_for("a checkpoint being written", lambda: any(folder.glob(".step-*")), every_seconds=_QUICKLY)
    struck_at = run.kill(victim)
    return struck(dataclasses.replace(mark, lines=run.lines()), struck_at)


def controller(run: Run) -> Mark:
    """Kill Ray Train's actor between the command and the workers with SIGKILL."""
    (victim,) = run.census.titled("TrainController")
    starts, mark = run.starts, run.mark()
    mark = struck(mark, run.kill(victim))
    run.wait_for("the command to notice", lambda: run.over or run.mark().inode != mark.inode, 180, ended=True)
    if run.over:
        run.start()
    assert run.starts - starts <= 1
    return mark


def driver(run: Run, number: int) -> Mark:
    """Send a signal to the command; the user repeats it after its end."""
    assert run.driver is not None
    run.workers()
    mark = run.mark()
    run.driver.send_signal(number)
    mark = struck(mark, time.time())
    if run.wait(90) == 0:
        raise ChaosError("the command ended with status 0 although it had not finished")
    run.start()
    return mark


def exporting(run: Run) -> Mark:
    """Kill the command with SIGKILL while it writes the encoder; the user repeats it."""
    assert run.driver is not None
    run.wait_for("the export", lambda: any(run.folder.glob(f".{EXPORT}.*")), 240, every_seconds=_QUICKLY)
    mark = run.mark()
    run.driver.kill()
    mark = struck(mark, time.time())
    run.wait()
    if (run.folder / EXPORT).exists():
        raise ChaosError("the encoder was complete before the command could be killed")
    run.start()
    run.wait()
    run.ended = time.time()
    return mark


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
