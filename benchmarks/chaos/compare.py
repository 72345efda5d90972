"""Comparison of a disturbed run with the quiet run: documents and losses of every step, last parameters, files."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.fault import FaultRow, fail
from benchmarks.chaos.run import ChaosError, Run
from declutr.common.storage import hash_file
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, checkpoint_path, steps_in
from declutr.trainer.driver.exported import EXPORT

_LOSSES = ("loss", "contrastive", "mlm")
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class End:
    """Final state of a run.

    Attributes:
        digests: digests of documents, spans and masks, by step.
        losses: losses by step.
        parameters: checksums of the files of the last checkpoint and of the encoder.
        seconds: time from the first step to the last.
    """

    digests: dict[int, int]
    losses: dict[int, tuple[float, ...]]
    parameters: dict[str, str]
    seconds: float

    @classmethod
    def of(cls, run: Run) -> "End":
        """Read the state of a run that has ended, or its state so far."""
        lines = run.lines()
        last = max(lines, default=0)
        return cls(
            {step: line["batch_digest"] for step, line in lines.items()},
            {step: tuple(line[name] for name in _LOSSES) for step, line in lines.items()},
            _parameters(run.folder, last),
            lines[last]["time"] - lines[min(lines)]["time"] if lines else 0.0,
        )


def compare(
    row: FaultRow, run: Run, quiet: End, ended: bool = True, world_changes: bool = False, alters: bool = False
) -> None:
    """Compare a run with the quiet one, completely or as far as it came, and record the result of a fault.

    Args:
        row: result of the fault.
        run: the disturbed run.
        quiet: state of the quiet run.
        ended: whether the run finished; otherwise only its steps so far are compared.
        world_changes: whether the number of workers changed, which changes the order of sums.
        alters: whether updates were skipped on purpose; then only documents, spans and masks are compared.
    """
    try:
        end = End.of(run)
    except ChaosError as error:
        fail(row, str(error))
        return
    if ended and not alters and set(end.digests) != set(quiet.digests):
        fail(row, f"{len(end.digests)} steps in the metrics, the quiet run has {len(quiet.digests)}")
    common = sorted(set(end.digests) & set(quiet.digests))
    others = [step for step in common if end.digests[step] != quiet.digests[step]]
    row.batches_identical = not others and bool(common)
    if others:
        fail(row, f"other documents or spans at {len(others)} steps, first {others[0]}")
    if alters:
        return
    pairs = [pair for step in common for pair in zip(end.losses[step], quiet.losses[step], strict=True)]
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs]  # the nearest neighbour of a float32 of 9 is 1e-6 away
    row.loss_difference = max(apart, default=0.0)
    if row.loss_difference > (_TOLERANCE if world_changes else 0):
        fail(row, f"losses differ by up to {row.loss_difference:.1e}")
    if ended and not world_changes:
        row.parameters_identical = end.parameters == quiet.parameters
        if not row.parameters_identical:
            changed = [name for name in quiet.parameters if end.parameters.get(name) != quiet.parameters[name]]
            fail(row, f"other bits in {', '.join(changed)}")
    halves = [str(path) for path in run.folder.rglob(".*.tmp")] if ended else []
    if halves:
        fail(row, f"half-written and left: {', '.join(halves)}")


def _parameters(folder: Path, step: int) -> dict[str, str]:
    paths = []
    if step in steps_in(folder / CHECKPOINTS):
        paths = sorted(checkpoint_path(folder / CHECKPOINTS, step).glob("*.safetensors"))
    paths.append(folder / EXPORT / "model.safetensors")
    return {str(path.relative_to(folder)): hash_file(path) for path in paths if path.is_file()}
