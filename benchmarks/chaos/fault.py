"""A fault: the action on a run, the message its user should see, its cost, and the end compared with the quiet run."""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.chaos.run import Run, Snapshot
from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in
from declutr.trainer.checkpoints.state import EXPORT

_WORDS_SECONDS = 5.0  # a worker's message reaches the command's output through the control channel
Setting = Literal["machine", "cluster", "elastic"]


@dataclass(frozen=True)
class Fault:
    """One line of the matrix."""

    name: str  # name of the fault
    # causes the fault in a run that trains and returns the moment of the fault. It also repeats the command if the user
    # would have to.
    inject: Callable[[Run], Snapshot]
    message: str  # pattern of the message that the user must see; empty: none
    # place of the fault: one machine, a cluster with a fixed world, or one whose world may change.
    setting: Setting = "machine"
    restarts: bool = True  # whether the workers restart
    trains: bool = True  # whether new steps follow; False if the run was at its end
    needs_root: bool = False  # whether it needs a mount, and so root
    alters: bool = False  # whether updates are skipped, so that only documents and spans equal those of the quiet run
    changes: dict[str, Any] = field(default_factory=dict)  # settings of the run that the fault needs
    steps: int = 0  # steps that its run needs at least

    @property
    def possible(self) -> bool:
        """Return whether the fault can be caused here."""
        return not self.needs_root or os.geteuid() == 0

    def see(self, run: Run, snapshot: Snapshot, row: "FaultRow") -> None:
        """Record the line that informed the user, and a problem with the output, if any."""
        deadline = time.monotonic() + _WORDS_SECONDS * run.patience
        while True:
            output = run.messages(snapshot)
            message = next((line for line in output.splitlines() if re.search(self.message, line)), "")
            if message or not self.message or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        row.seen_by_user = message[:300]
        if "Traceback (most recent call last)" in output:
            fail(row, "a Traceback was shown")
        elif self.message and not message:
            fail(row, f"nothing was said (expected {self.message!r})")


@dataclass
class FaultRow:
    """Result of a fault."""

    name: str  # name of the fault
    # whether the run continued as promised, informed its user, and ended like the quiet one; None: not tried.
    recovered: bool | None = None
    lost_seconds: float | None = None  # time between the last kept step and the fault
    recovery_seconds: float | None = None  # time between the fault and the first step after it
    # whether documents, spans and masks of every step equal those of the quiet run.
    batches_identical: bool | None = None
    # whether parameters, moments, queue and encoder are equal, bit for bit; None: another world size.
    parameters_identical: bool | None = None
    commands: int = 0  # times the user had to repeat the command
    seen_by_user: str = ""  # line that informed the user
    problem: str = ""  # reason why the run has not recovered
    loss_difference: float | None = None  # largest difference of a step's losses from the quiet run's, relative above 1


def observe(run: Run, fault: Fault, row: FaultRow) -> Snapshot:
    """Cause the fault, wait for the first new step, and record the loss; return the moment of the fault."""
    starts = run.starts
    snapshot = fault.inject(run)
    row.commands = run.starts - starts
    if not fault.trains:
        row.lost_seconds = 0.0
        row.recovery_seconds = run.ended - snapshot.seconds
        return snapshot
    line = run.wait_for(f"a step after {fault.name}", _first_new(run, snapshot, fault.restarts), 240, every_seconds=0.1)
    kept = line["step"] - 1
    moment = snapshot.lines[kept]["time"] if kept in snapshot.lines else None
    if kept == 0:  # all of the work since the first step began
        moment = min((line["time"] - line["seconds"] for line in snapshot.lines.values()), default=None)
    # a kept step that was not seen before the fault was completed after it
    row.lost_seconds = 0.0 if moment is None or not fault.restarts else max(0.0, snapshot.seconds - moment)
    row.recovery_seconds = line["time"] - snapshot.seconds
    return snapshot


def _first_new(run: Run, snapshot: Snapshot, restarts: bool) -> Callable[[], dict[str, Any] | None]:
    """Return a function that finds the line of the first step after a fault."""
    seen_at: list[float] = []

    def look() -> dict[str, Any] | None:
        now = run.snapshot()
        after = [line for step, line in sorted(now.lines.items()) if line["time"] > snapshot.seconds]
        if not restarts:
            return next((line for line in after if line["step"] > snapshot.step), None)
        if now.inode in (None, snapshot.inode):  # a restart writes the metrics anew
            return None
        seen_at.append(now.seconds)
        if not any(line["time"] > seen_at[0] for line in after):
            return None
        # Workers that were asked to stop may take one or two more steps: new steps come after the longest pause.
        pauses = {line["step"]: line["time"] - now.lines.get(line["step"] - 1, {"time": 0.0})["time"] for line in after}
        return now.lines[max(pauses, key=lambda step: pauses[step])]

    return look


def fail(row: FaultRow, problem: str) -> None:
    """Add a reason why a fault is not recovered."""
    row.problem = f"{row.problem}; {problem}" if row.problem else problem


_LOSSES = ("loss", "contrastive", "mlm")
_TOLERANCE = 1e-6  # another world adds in another order: 6.6e-7 was seen (docs/evidence/reliability.md)


@dataclass(frozen=True)
class End:
    """Final state of a run."""

    digests: dict[int, int]  # digests of documents, spans and masks, by step
    losses: dict[int, tuple[float, ...]]  # losses by step
    parameters: dict[str, str]  # checksums of the files of the last checkpoint and of the encoder
    seconds: float  # time from the first step to the last

    @classmethod
    def of(cls, run: Run) -> "End":
        """Read the state of a run that has ended."""
        lines = run.lines()
        last = max(lines, default=0)
        return cls(
            {step: line["batch_digest"] for step, line in lines.items()},
            {step: tuple(line[name] for name in _LOSSES) for step, line in lines.items()},
            _parameters(run.folder, last),
            lines[last]["time"] - lines[min(lines)]["time"] if lines else 0.0,
        )


def compare(row: FaultRow, run: Run, quiet: End, fault: Fault) -> None:
    """Compare a run that has ended with the quiet one, and record the result of its fault."""
    end, world_changes = End.of(run), fault.setting == "elastic"  # which changes the order of sums
    if not fault.alters and set(end.digests) != set(quiet.digests):
        fail(row, f"{len(end.digests)} steps in the metrics, the quiet run has {len(quiet.digests)}")
    common = sorted(set(end.digests) & set(quiet.digests))
    changed_steps = [step for step in common if end.digests[step] != quiet.digests[step]]
    row.batches_identical = not changed_steps and bool(common)
    if changed_steps:
        fail(row, f"other documents or spans at {len(changed_steps)} steps, first {changed_steps[0]}")
    if fault.alters:
        return
    pairs = [pair for step in common for pair in zip(end.losses[step], quiet.losses[step], strict=True)]
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]  # the nearest neighbour of a float32 of 9 is 1e-6 away
    row.loss_difference = max(apart, default=0.0)
    if row.loss_difference > (_TOLERANCE if world_changes else 0):
        fail(row, f"losses differ by up to {row.loss_difference:.1e}")
    if not world_changes:
        row.parameters_identical = end.parameters == quiet.parameters
        if not row.parameters_identical:
            changed = [name for name in quiet.parameters if end.parameters.get(name) != quiet.parameters[name]]
            fail(row, f"other bits in {', '.join(changed)}")
    if halves := [str(path) for path in run.folder.rglob(".*.tmp")]:
        fail(row, f"half-written and left: {', '.join(halves)}")


def _parameters(folder: Path, step: int) -> dict[str, str]:
    paths = []
    if step in steps_in(folder / CHECKPOINTS):
        paths = sorted(checkpoint_path(folder / CHECKPOINTS, step).glob("*.safetensors"))
    paths.append(folder / EXPORT / "model.safetensors")
    return {str(path.relative_to(folder)): hash_file(path) for path in paths if path.is_file()}
