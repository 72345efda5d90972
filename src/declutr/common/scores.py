"""Scores of a run's checkpoints: `scores.jsonl` in the run folder, written by the scorer and read by the trainer.

The two share this file and `scoring.json`, which names the checkpoint that is being scored. A line is appended in one
call, so that lines of two writers cannot mix. A line that a kill has cut off is ignored, and the next writer starts a
new line.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from pydantic import ConfigDict, ValidationError

from declutr.common.config import Strict
from declutr.common.storage import DamagedError, read_record, write_json

SCORES = "scores.jsonl"
SCORING = "scoring.json"


class ScoreLine(Strict):
    """One checkpoint's scores."""

    model_config = ConfigDict(allow_inf_nan=True)  # a measured value may be infinite

    step: int
    """Step of the checkpoint."""
    checkpoint: str
    """Hash of its files' checksums: a step that was repeated with other weights is another checkpoint."""
    choice: str
    """Identity of tasks, data and settings; scores of two choices are not comparable."""
    score: float | None
    """Mean over the tasks on dev data in percent, higher is better; None if a task could not be scored."""
    tasks: Mapping[str, float]
    """Percent by task, on dev data."""
    test: Mapping[str, float]
    """Percent by task on test data, which decides nothing."""
    warnings: tuple[str, ...] = ()
    """Notes shown with the score: a collapsed encoder, non-standard data."""
    seconds: float = 0.0
    """Seconds for loading and scoring."""
    time: float = 0.0
    """Time at which scoring finished, in seconds since 1970."""


class _Scoring(msgspec.Struct, frozen=True):
    step: int


def append_score(run: Path, line: ScoreLine) -> None:
    """Appends a line and forces it to disk."""
    handle = os.open(run / SCORES, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, (("\n" if torn else "") + line.model_dump_json() + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def read_scores(run: Path) -> tuple[ScoreLine, ...]:
    """All whole lines in the order in which they were written; none if the file is missing."""
    path = run / SCORES
    if not path.is_file():
        return ()
    found = []
    for raw in path.read_bytes().split(b"\n")[:-1]:
        try:
            found.append(ScoreLine.model_validate_json(raw))
        except ValidationError:
            continue  # cut off by a kill; the checkpoint is scored again
    return tuple(found)


def comparable(lines: Sequence[ScoreLine]) -> dict[tuple[int, str], float]:
    """The scores that may be compared, by step and checkpoint, in the order in which they were written.

    These are the scores with the newest line's choice; a change of tasks or settings starts a new comparison. A
    checkpoint with a task that could not be scored is left out.
    """
    return {
        (line.step, line.checkpoint): line.score
        for line in lines
        if line.choice == lines[-1].choice and line.score is not None
    }


@contextmanager
def scoring(run: Path, step: int) -> Iterator[None]:
    """Marks the checkpoint that is scored while the block runs, so that it is not deleted.

    The mark of a killed process stays until the next block, so that one checkpoint more is kept.
    """
    write_json(run / SCORING, {"step": step})
    try:
        yield
    finally:
        (run / SCORING).unlink(missing_ok=True)


def read_scoring(run: Path) -> int | None:
    """Step of the checkpoint that is being scored; None if there is none or the file is damaged."""
    try:
        return read_record(run / SCORING, _Scoring).step
    except (FileNotFoundError, DamagedError):
        return None
