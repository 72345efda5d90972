"""Checkpoints: complete folders with checksums; which are kept, which is the best, and early stopping. No Ray.

"Latest" means the latest that verifies. Every decision follows from files, so a resumed run decides like one that was
never stopped.

A checkpoint is `step-XXXXXXXX/` with encoder.safetensors (every parameter once), optimizer.safetensors (moments by
parameter name), objective.safetensors (those of the objective) and state.json (RunState). An auxiliary task adds
NAME.objective.safetensors, NAME.frontend.safetensors if it reads patches, and NAME.optimizer.safetensors if it has
its own update. Nothing in it is pickled.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from declutr.common.config import first_problem
from declutr.common.console.logs import get_logger
from declutr.common.errors import CheckpointError, UnreadableError
from declutr.common.storage import atomic_folder, read_json, write_json
from declutr.trainer.checkpoints.state import XXH3, CheckpointConfig, RunState
from declutr.trainer.metrics.metrics import read_metrics

if TYPE_CHECKING:  # reading a state needs no torch
    from torch import Tensor

Contents = dict[str, "dict[str, Tensor]"]  # the tensors of a checkpoint by file and name, on the CPU

CHECKPOINTS = "checkpoints"  # the folder of a run that holds its checkpoints

_NAME = re.compile(r"step-(\d{8})")
ENCODER, OPTIMIZER, OBJECTIVE, FRONTEND, STATE = (
    "encoder.safetensors",
    "optimizer.safetensors",
    "objective.safetensors",
    "frontend.safetensors",
    "state.json",
)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def save(folder: Path, state: RunState, contents: Contents) -> Path:
    """Writes the checkpoint of `state.step`, whole or not at all, and adds checksums and sizes to its state."""
    from declutr.trainer.checkpoints.saver import write_tensors

    path = checkpoint_path(folder, state.step)
    if path.exists():  # skipped as broken at the start; the run has now reached its step again
        discard(path)
    with atomic_folder(path) as aside:
        files = {name: write_tensors(aside / name, contents[name]) for name in sorted(contents)}
        sizes = {name: (aside / name).stat().st_size for name in files}
        write_json(aside / STATE, state.model_copy(update={"files": files, "sizes": sizes}).model_dump(mode="json"))
    return path


def discard(path: Path) -> None:
    """Deletes a checkpoint, renamed first, so that a kill leaves nothing that looks like a checkpoint."""
    gone = path.with_name(f".{path.name}.gone.tmp")
    shutil.rmtree(gone, ignore_errors=True)  # of a call that was killed
    path.rename(gone)
    shutil.rmtree(gone)


def read_state(path: Path, verify: bool = True) -> RunState:
    """Reads the state of a checkpoint and compares its files with it, without `verify` only their sizes."""
    name = STATE
    try:
        state = RunState.model_validate(read_json(path / STATE), strict=True)
        match = _NAME.fullmatch(path.name)
        if match and state.step != int(match[1]):
            raise CheckpointError(f"{path}: {STATE} is damaged (it names step {state.step})")
        listed = state.files.keys() & state.sizes.keys()
        unknown = ({file.name for file in path.glob("*.safetensors")} | state.files.keys()) - listed
        if unknown or not listed:
            of = ", ".join(sorted(unknown)) or "any file"
            raise CheckpointError(f"{path}: {STATE} is damaged (no checksum or size of {of})")
        for name, expected in state.files.items():
            status = (path / name).stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
                raise CheckpointError(f"{path}: {name} is a pipe or a device, not a file")
            if size != state.sizes[name]:
                raise CheckpointError(f"{path}: {name} is truncated or altered ({size} bytes, not {state.sizes[name]})")
            if verify:
                with (path / name).open("rb") as stream:
                    checksum = XXH3 + hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
                if checksum != expected:
                    raise CheckpointError(f"{path}: {name} is truncated or altered (checksum differs)")
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        word = "missing or unreadable" if name == STATE else "missing"
        raise CheckpointError(f"{path}: {name} is {word} ({error.strerror})") from error
    except OSError as error:
        raise UnreadableError(f"{path}: {name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {STATE} is missing or unreadable ({first_problem(error, RunState)})") from error
    return state


def steps_in(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, in order."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - glob treats an unreadable folder as empty
    except FileNotFoundError:
        return []
    return steps_among(names)


def states_in(folder: Path, warn: bool = False) -> Iterator[tuple[int, RunState]]:
    """Steps and states of the checkpoints whose state can be read, in order; their files are not verified.

    Others are skipped, with a warning if `warn` says so; the resume of a run warns of those it looks at.
    """
    for step in steps_in(folder):
        try:
            state = read_state(checkpoint_path(folder, step), verify=False)
        except CheckpointError as error:
            if warn:
                get_logger().warning("skipping a broken checkpoint: %s", error)
            continue
        yield step, state


def steps_among(names: Iterable[str]) -> list[int]:
    """Steps of the checkpoints among the names of folders, in order."""
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def find_latest(
    folder: Path, expected: Mapping[str, str] | None = None, verify: bool = True
) -> tuple[Path, RunState] | None:
    """Finds the newest checkpoint that verifies; as `first_whole`."""
    return first_whole(folder, reversed(steps_in(folder)), expected, verify)


def first_whole(
    folder: Path, steps: Iterable[int], expected: Mapping[str, str] | None = None, verify: bool = True
) -> tuple[Path, RunState] | None:
    """Finds the first of these checkpoints that verifies and logs each one it skips; None: no checkpoint verifies.

    `expected` has fields of RunState and their values in this run; a checkpoint that differs belongs to another run.
    `verify` is as for `read_state`.
    """
    unreadable: UnreadableError | None = None
    for step in steps:
        path = checkpoint_path(folder, step)
        try:
            for field, value in (expected or {}).items():
                other = getattr(read_state(path, verify=False), field)  # before gigabytes are hashed
                if other != value:
                    raise CheckpointError(f"{path}: {STATE} is of another run ({field} {other[:16]}, not {value[:16]})")
            return path, read_state(path, verify)
        except CheckpointError as error:
            get_logger().warning("skipping a broken checkpoint: %s", error)
            unreadable = error if isinstance(error, UnreadableError) else unreadable
    if unreadable is not None:
        raise unreadable
    return None


def history(run: Path, score: str, step: int) -> dict[int, float]:
    """Scores of a run by step, up to `step`, including those of deleted checkpoints; later steps will be repeated.

    The weights before the first step have no checkpoint and do not count.
    """
    lines = [line for line in read_metrics(run) if line["kind"] == "validation" and 0 < line["step"] <= step]
    return dict(sorted((line["step"], line[score]) for line in lines if line.get(score) is not None))


def from_best(scores: Mapping[int, float]) -> list[int]:
    """Steps in the order of their scores, best first; of equal scores the earliest first."""
    return sorted(scores, key=lambda step: (-scores[step], step))


def find_best(folder: Path, score: str) -> tuple[Path, RunState] | None:
    """Finds the checkpoint with the highest score among those that verify; the earliest of equal scores.

    Logs each one that it skips, because it may have been the best.
    """
    scores = {step: state.scores[score] for step, state in states_in(folder, warn=True) if score in state.scores}
    return first_whole(folder, from_best(scores))


def early_end(
    scores: Mapping[int, float],  # held-out scores by step
    score: str,  # `validation.score`
    patience: int | None,  # `validation.patience`
) -> str | None:
    """The reason why a run with these scores by step ends early; None: it goes on, as always without a patience."""
    if patience is None or not scores:
        return None
    best = from_best(scores)[0]
    since = sum(step > best for step in scores)  # `from_best` has the earliest of equals: an equal score is no better
    if since < patience:
        return None
    return (
        f"{score} was best after step {best} ({scores[best]:.4g}), and none of the {since} scores since is better "
        f"(validation.patience = {patience})"
    )


def kept(
    scores: Mapping[int, float | None],  # score of every whole checkpoint by step; None if it was not validated
    config: CheckpointConfig,  # which checkpoints are kept
) -> dict[int, list[str]]:
    """Steps to keep, each with its reasons (`last`, `best`, `every`), in order."""
    reasons: dict[int, list[str]] = {step: [] for step in sorted(scores)}
    for step in sorted(scores)[-config.keep_last :]:
        reasons[step].append("last")
    scored = [(score, -step) for step, score in scores.items() if score is not None]
    if scored:
        reasons[-max(scored)[1]].append("best")  # the earliest of equals, as for the export
    if config.keep_every_steps is not None:
        for step in reasons:
            if step % config.keep_every_steps == 0:
                reasons[step].append("every")
    return {step: why for step, why in reasons.items() if why}


def prune(folder: Path, config: CheckpointConfig, score: str, newest: int) -> None:
    """Deletes checkpoints that are not kept or are broken.

    `newest` is the step of the newest checkpoint that this run has written. Later ones were skipped as broken when the
    run started. They do not count, because they would displace the newest whole one. They stay until the run reaches
    their steps, unless their state shows the damage.
    """
    scores: dict[int, float | None] = {}
    stay: set[int] = set()
    for step in steps_in(folder):
        try:
            state = read_state(checkpoint_path(folder, step), verify=False)
        except UnreadableError:  # decide at the next call
            stay.add(step)
        except CheckpointError:  # broken: deleted below
            continue
        else:
            if step > newest:
                stay.add(step)
            else:
                scores[step] = state.scores.get(score)
    stay |= kept(scores, config).keys()
    for step in steps_in(folder):
        if step not in stay:
            discard(checkpoint_path(folder, step))
