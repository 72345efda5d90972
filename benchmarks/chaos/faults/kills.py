"""Processes that die: workers, the controller, the command itself."""

import dataclasses
import signal
import time
from collections.abc import Callable

from benchmarks.chaos.fault import Fault
from benchmarks.chaos.run import ChaosError, Mark, Run
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.driver.export import EXPORT


def struck(mark: Mark, seconds: float) -> Mark:
    """The mark with the moment at which it really happened."""
    return dataclasses.replace(mark, seconds=seconds)


def worker(run: Run) -> Mark:
    """SIGKILL of the last worker, in the middle of whatever step it is at."""
    victim = run.workers()[-1]
    mark = run.mark()
    return struck(mark, run.kill(victim))


def worker_terminated(run: Run) -> Mark:
    """SIGTERM, as a batch system sends it."""
    victim = run.workers()[-1]
    mark = run.mark()
    return struck(mark, run.kill(victim, signal.SIGTERM))


def worker_saving(run: Run) -> Mark:
    """SIGKILL of rank 0 while the files of a checkpoint are being written."""
    victim = run.workers()[0]
    folder = run.folder / CHECKPOINTS
    mark = run.mark()
    _wait_quickly(lambda: any(folder.glob(".step-*")))
    struck_at = run.kill(victim)
    return struck(dataclasses.replace(mark, lines=run.lines()), struck_at)


def controller(run: Run) -> Mark:
    """SIGKILL of the actor that Ray Train puts between the command and the workers."""
    (victim,) = run.census.titled("TrainController")
    starts, mark = run.starts, run.mark()
    mark = struck(mark, run.kill(victim))
    run.wait_for("the command to notice", lambda: _over(run) or _restarted(run, mark), 180, ended=True)
    if _over(run):
        run.start()
    assert run.starts - starts <= 1
    return mark


def _over(run: Run) -> bool:
    return run.driver is not None and run.driver.poll() is not None


def _restarted(run: Run, mark: Mark) -> bool:
    return run.mark().inode != mark.inode


def driver(run: Run) -> Mark:
    """SIGKILL of the command; the user gives it again at once."""
    return _end_driver(run, signal.SIGKILL)


def driver_terminated(run: Run) -> Mark:
    """SIGTERM of the command; the user gives it again when it has ended."""
    return _end_driver(run, signal.SIGTERM)


def _end_driver(run: Run, number: int) -> Mark:
    assert run.driver is not None
    run.workers()
    mark = run.mark()
    run.driver.send_signal(number)
    mark = struck(mark, time.time())
    if run.wait(90) == 0:
        raise ChaosError("the command ended with status 0 though it had not finished")
    run.start()
    return mark


def exporting(run: Run) -> Mark:
    """SIGKILL of the command while it writes the encoder; the user gives it again."""
    assert run.driver is not None
    _wait_quickly(lambda: any(run.folder.glob(f".{EXPORT}.*")), 240)
    mark = run.mark()
    run.driver.kill()
    mark = struck(mark, time.time())
    run.wait()
    if (run.folder / EXPORT).exists():
        raise ChaosError("the encoder was whole before the command could be killed")
    run.start()
    run.wait()
    run.ended = time.time()
    return mark


def _wait_quickly(check: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise ChaosError("the moment to strike did not come")
        time.sleep(0.0005)


FAULTS = (
    Fault("worker_killed", worker, "worker 1 .*died"),
    Fault("worker_killed_while_saving", worker_saving, "worker .* died"),
    Fault("worker_terminated", worker_terminated, r"saved at step \d+ after SIGTERM to worker \d+ \("),
    Fault("controller_killed", controller, "coordinates the workers died"),
    Fault("driver_terminated", driver_terminated, r"stopped at step \d+ of \d+ after SIGTERM"),
    Fault("driver_killed", driver, r"continuing after step \d+ of"),
    Fault("driver_killed_exporting", exporting, "finished already|encoder in", trains=False),
)
