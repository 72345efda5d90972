"""Comparison of inputs with what finished units were made from, where their names and sizes are the same."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from common.console.logs import get_logger
from common.stores.address import is_remote
from pipeline.config import PipelineConfig
from pipeline.job.output import PLAN, Plan
from pipeline.job.unit_writer import load_sidecar, sidecar_path
from pipeline.job.units import Unit
from pipeline.job.worker import CANDIDATES
from pipeline.readers.stamp import Stamp, digest_parts
from pipeline.shards.manifest import MANIFEST

_THREADS = 4


def content_problems(folder: Path, config: PipelineConfig, units: Sequence[Unit], verify: bool = False) -> list[str]:
    """The reason why a folder's work cannot continue with these inputs, if any.

    A time that changed is no change by itself: a file whose head, middle and tail are the same is read whole, and
    compared with what was noted when it was prepared.

    Args:
        folder: an output folder of which the plan agrees with the units.
        config: settings.
        units: marked units.
        verify: read every byte again, also of files whose time is the same.
    """
    finished = (folder / MANIFEST).exists()
    if finished and config.corpus.kind == "python_docs":  # as for the names and sizes of installed packages
        return []
    try:
        plan = Plan.model_validate_json((folder / PLAN).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return []
    judge = _Judge(folder, plan, finished, verify)
    with ThreadPoolExecutor(_THREADS) as pool:
        changed = [unit for unit, same in zip(units, pool.map(judge.is_same, units), strict=True) if not same]
    if changed:
        return [
            f"output = {config.output!r} was begun with other contents of its inputs: {len(changed)} of {len(units)} "
            f"units changed although names and sizes are the same, the first at {changed[0].parts[0].source}; put the "
            "earlier files back, name another folder or delete this one"
        ]
    judge.tell(len(units))
    return []


class _Judge:
    """Compares the inputs of units with what was noted of them."""

    def __init__(self, folder: Path, plan: Plan, finished: bool, verify: bool) -> None:
        self._folder, self._plan, self._finished, self._verify = folder, plan, finished, verify
        self._unnoted: list[str] = []
        self._touched: list[str] = []
        self._verified: list[str] = []
        self._remote: list[str] = []

    def is_same(self, unit: Unit) -> bool:
        """Whether a unit's inputs are those that were noted."""
        now, noted = unit.stamp, self._noted(unit)
        if now is None:
            return True
        if noted is None:
            return self._is_older(unit)
        if now.sample != noted.sample:
            return False
        if now.modified == noted.modified and not self._verify:
            return True
        if any(is_remote(part.path) for part in unit.parts):
            self._remote.append(unit.name)
            return now.modified == noted.modified
        if noted.digest is None:  # nothing was made of it yet
            return True
        (self._verified if self._verify else self._touched).append(unit.name)
        return digest_parts(unit.parts) == noted.digest

    def _noted(self, unit: Unit) -> Stamp | None:
        for folder in (self._folder, self._folder / CANDIDATES):
            if sidecar := load_sidecar(folder, unit.name):
                return sidecar.stamp
        return self._plan.stamps.get(unit.name)

    def _is_older(self, unit: Unit) -> bool:
        """Where an earlier version noted nothing: whether the inputs are older than what was made of them."""
        paths = [sidecar_path(folder, unit.name) for folder in (self._folder / CANDIDATES, self._folder)]
        made = [path.stat().st_mtime_ns for path in paths if path.exists()]
        if not made:
            return True
        self._unnoted.append(unit.name)
        local = [Path(part.path) for part in unit.parts if not is_remote(part.path)]
        return self._finished or all(path.stat().st_mtime_ns <= min(made) for path in local if path.exists())

    def tell(self, num_units: int) -> None:
        """Says what was taken for the same, and why."""
        if self._touched:
            get_logger().info("%d of %d units: other times, the same bytes", len(self._touched), num_units)
        if self._verify:
            get_logger().info("%d of %d units: every byte is as it was read", len(self._verified), num_units)
        if self._verify and self._remote:
            get_logger().warning("%d units: compared by size and tag of remote files only", len(self._remote))
        if self._unnoted:
            get_logger().warning(
                "%d of %d units were made by an earlier version, which noted names and sizes of inputs only: taken as "
                "they are%s",
                len(self._unnoted),
                num_units,
                "" if self._finished else ", because no input is newer than them",
            )
