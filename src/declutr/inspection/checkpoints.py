"""`declutr checkpoints RUN`: every checkpoint of a run, verified, with the reason to keep it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from declutr.common.config import first_problem
from declutr.common.console.terminal import age
from declutr.common.yamlfile import read_yaml_file
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.ranking import being_scored, rating
from declutr.trainer.checkpoints.retention import kept
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.setup.config import TrainConfig


class CheckpointsError(ValueError):
    """The folder is not a run with checkpoints."""


@dataclass(frozen=True)
class CheckpointRow:
    """Facts about one checkpoint."""

    step: int
    """Optimizer steps done."""
    broken: str | None
    """Reason why it cannot be used; None if all checksums match."""
    age_seconds: float | None
    """Seconds since it was written; None if unknown."""
    size_bytes: int
    """Size of all its files."""
    documents: int | None
    """Documents read so far; None, like the next fields, if the state cannot be read."""
    world_size: int | None
    """Workers that took the last step."""
    skipped: int | None
    """Steps so far whose update was skipped."""
    scores: dict[str, float]
    """Held-out scores; empty without validation. `followed`: the follower's score, if the run is rated by it."""
    kept: list[str]
    """`last`, `best`, `every`, `scoring`; empty if it is deleted with the next checkpoint."""


def rows(run: Path) -> list[CheckpointRow]:
    """List the checkpoints of a run, oldest first; reads all of their bytes.

    Raises:
        CheckpointsError: the run does not exist, has no checkpoint yet, or has unreadable settings.
    """
    if run.is_file():
        raise CheckpointsError(f"{run} is a file; name the folder of a run")
    folder = run / CHECKPOINTS
    steps = checkpoint.steps_in(folder)
    if not steps:
        raise CheckpointsError(f"{run}: {folder} has no checkpoint")
    try:
        config = TrainConfig.model_validate(read_yaml_file(run / "config.yaml"))
    except (OSError, ValueError, RecursionError) as error:
        reason = first_problem(error, TrainConfig) if isinstance(error, ValueError) else error
        raise CheckpointsError(f"{run}: its config.yaml cannot be read ({reason})") from error
    now = time.time()
    score = config.validation.score
    rate = rating(folder, score)
    rows = (_row(checkpoint.checkpoint_path(folder, step), step, now, score, rate) for step in steps)
    found = [row for row in rows if row is not None]
    scores = {row.step: row.scores.get(score) for row in found if row.broken is None}
    why = kept(scores, config.checkpoint, being_scored(folder, score))
    return [replace(row, kept=why.get(row.step, [])) for row in found]


def _row(
    path: Path, step: int, now: float, score: str, rate: Callable[[RunState], float | None]
) -> CheckpointRow | None:
    """The checkpoint's row; None if its run has deleted it meanwhile."""
    try:
        files = [file.stat() for file in path.iterdir() if file.is_file()]
    except FileNotFoundError:
        return None
    age = round(now - max(file.st_mtime for file in files), 1) if files else None
    row = CheckpointRow(step, None, age, sum(file.st_size for file in files), None, None, None, {}, [])
    try:
        state = checkpoint.read_state(path)
    except checkpoint.CheckpointError as error:
        if not path.is_dir():
            return None
        return replace(row, broken=str(error).removeprefix(f"{path}: ").splitlines()[0])
    value = rate(state)
    scores = state.scores | ({} if value is None else {score: value})
    return replace(row, documents=state.documents, world_size=state.world_size, skipped=state.skipped, scores=scores)


def table(found: list[CheckpointRow]) -> Iterator[str]:
    """Format the checkpoints as lines of text."""
    yield f"{'step':>8s} {'documents':>12s} {'age':>8s} {'MiB':>9s} {'workers':>8s}  {'kept':16s} state"
    for row in found:
        documents = "?" if row.documents is None else f"{row.documents:,}"
        old = "?" if row.age_seconds is None else age(row.age_seconds)
        scores = "  ".join(f"{name} {value:.4f}" for name, value in row.scores.items())
        state = "verified" if row.broken is None else f"BROKEN: {row.broken}"
        why = ", ".join(row.kept) or "-"
        skipped = f"  {row.skipped} steps skipped" if row.skipped else ""
        yield (
            f"{row.step:8d} {documents:>12s} {old:>8s} {row.size_bytes / 2**20:9.1f} "
            f"{'?' if row.world_size is None else row.world_size:>8}  {why:16s} {state}{skipped}  {scores}"
        ).rstrip()
