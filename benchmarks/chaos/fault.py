"""A fault: what is done to a run, what its user should see, and what it cost."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.chaos.run import Mark, Run

_WORDS_SECONDS = 5.0  # a worker's words reach the command's output by way of the channel
Setting = Literal["machine", "cluster", "elastic", "skip"]


@dataclass(frozen=True)
class Fault:
    """One line of the matrix.

    Attributes:
        name: of the fault.
        inject: does it to a run that trains; answers the moment at which it happened. Where the user has to give the
            command again, it gives it.
        said: pattern of what the user must be told; None where nothing needs saying.
        setting: where it is done: one machine, a cluster whose world is fixed, a cluster whose world may change, or a
            run that skips bad losses.
        restarts: the workers begin anew.
        trains: there are new steps afterwards; False where the run was at its end.
        needs_root: because of a mount.
        alters: updates are left out, so only documents and spans are those of the quiet run.
        changes: settings of the run that the fault needs.
    """

    name: str
    inject: Callable[[Run], Mark]
    said: str | None
    setting: Setting = "machine"
    restarts: bool = True
    trains: bool = True
    needs_root: bool = False
    alters: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def possible(self) -> bool:
        """Can it be done here?"""
        return not self.needs_root or os.geteuid() == 0

    def seen(self, run: Run, mark: Mark) -> tuple[str, str]:
        """The line that told the user since, and what is wrong with what was said, if anything."""
        said, told = run.said(mark), ""
        until = time.monotonic() + _WORDS_SECONDS * run.patience
        while self.said is not None:
            told = next((line for line in said.splitlines() if re.search(self.said, line)), "")
            if told or time.monotonic() > until:
                break
            time.sleep(0.2)
            said = run.said(mark)
        problem = ""
        if "Traceback (most recent call last)" in said:
            problem = "a Traceback was shown"
        elif self.said is not None and not told:
            problem = f"nothing was said (expected {self.said!r})"
        return told[:300], problem


@dataclass
class Row:
    """What became of a fault.

    Attributes:
        name: of the fault.
        recovered: the run went on as promised, told its user, and ended like the quiet one; None: could not be tried.
        lost_seconds: between the last kept step and the fault.
        recovery_seconds: between the fault and the first step after it.
        batches_identical: documents, spans and masks of every step are those of the quiet run.
        parameters_identical: so are parameters, moments, queue and encoder, bit for bit; None: another world size.
        commands: how often the user had to give the command again.
        seen_by_user: the line that says it.
        problem: why it is not recovered.
        loss_difference: largest difference of a step's losses from the quiet run's, relative above 1.
    """

    name: str
    recovered: bool | None = None
    lost_seconds: float | None = None
    recovery_seconds: float | None = None
    batches_identical: bool | None = None
    parameters_identical: bool | None = None
    commands: int = 0
    seen_by_user: str = ""
    problem: str = ""
    loss_difference: float | None = None


def observe(run: Run, fault: Fault) -> tuple[Row, Mark]:
    """Does it, waits for the first new step, and measures what was lost.

    Raises:
        ChaosError: the run did not go on.
    """
    starts = run.starts
    mark = fault.inject(run)
    row = Row(fault.name, commands=run.starts - starts)
    if not fault.trains:
        row.lost_seconds = 0.0
        row.recovery_seconds = run.ended - mark.seconds
        return row, mark
    line = run.wait_for(f"a step after {fault.name}", _first_new(run, mark, fault.restarts), 240, every_seconds=0.1)
    kept, begun = line["step"] - 1, min((line["time"] - line["seconds"] for line in mark.lines.values()), default=None)
    moment = mark.lines[kept]["time"] if kept in mark.lines else begun if kept == 0 else None
    # a step that was kept and is not known from before the fault was still taken after it
    row.lost_seconds = 0.0 if moment is None or not fault.restarts else max(0.0, mark.seconds - moment)
    row.recovery_seconds = line["time"] - mark.seconds
    return row, mark


def _first_new(run: Run, mark: Mark, restarts: bool) -> Callable[[], dict[str, Any] | None]:
    """Looks for the line of the first step after a fault."""
    seen_at: list[float] = []

    def look() -> dict[str, Any] | None:
        now = run.mark()
        after = [line for step, line in sorted(now.lines.items()) if line["time"] > mark.seconds]
        if not restarts:
            return next((line for line in after if line["step"] > mark.step), None)
        if now.inode in (None, mark.inode):
            return None
        seen_at.append(now.seconds)
        if not any(line["time"] > seen_at[0] for line in after):
            return None
        # Workers that are told to end still take a step or two: new are the steps behind the longest pause.
        pauses = {line["step"]: line["time"] - now.lines.get(line["step"] - 1, {"time": 0.0})["time"] for line in after}
        return now.lines[max(pauses, key=lambda step: pauses[step])]

    return look


def fail(row: Row, problem: str) -> None:
    """Notes that it is not recovered, and why."""
    row.recovered = False
    row.problem = f"{row.problem}; {problem}" if row.problem else problem
