"""Comparison of inputs with those of finished units, if names and sizes are the same."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from declutr.common.console.logs import get_logger
from declutr.common.stores.address import is_remote
from declutr.common.stores.copies import PLAN
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.output import PreparePlan
from declutr.pipeline.job.unit_writer import load_sidecar
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.readers.input_state import InputState, digest_parts
from declutr.pipeline.shards.manifest import MANIFEST

_THREADS = 4


def content_problems(folder: Path, config: PipelineConfig, units: Sequence[Unit], verify: bool = False) -> list[str]:
    """Reasons why the work in a folder cannot continue with these inputs.

    A changed time alone is not a change: if head, middle and tail of a file are the same, the whole file is read and
    compared with the recorded digest.

    Args:
        folder: output folder whose plan matches the units.
        config: settings.
        units: the units, with the states of their files.
        verify: also read every byte of files whose time is the same.
    """
    if config.corpus.kind == "python_docs" and (folder / MANIFEST).exists():  # packages may change: output_problems
        return []
    try:
        plan = PreparePlan.model_validate_json((folder / PLAN).read_bytes())
    except (FileNotFoundError, ValidationError):
        return []
    check = _InputCheck(folder, plan, verify)
    with ThreadPoolExecutor(_THREADS) as pool:
        changed = [unit for unit, same in zip(units, pool.map(check.is_same, units), strict=True) if not same]
    if changed:
        return [
            f"output = {config.output!r} was started with other contents of its inputs: {len(changed)} of {len(units)} "
            f"units changed although names and sizes are the same, the first at {changed[0].parts[0].source}; restore "
            "the earlier files, name another folder or delete this one"
        ]
    check.tell(len(units))
    return []


class _InputCheck:
    """Compares the inputs of units with their recorded states."""

    def __init__(self, folder: Path, plan: PreparePlan, verify: bool) -> None:
        self._folder, self._plan, self._verify = folder, plan, verify
        self._touched: list[str] = []
        self._verified: list[str] = []
        self._remote: list[str] = []

    def is_same(self, unit: Unit) -> bool:
        """Returns True if a unit's inputs match their record."""
        now, noted = unit.input_state, self._noted(unit)
        if now is None:
            return True
        if noted is None or now.sample != noted.sample:
            return False
        if now.modified == noted.modified and not self._verify:
            return True
        if any(is_remote(part.path) for part in unit.parts):
            self._remote.append(unit.name)
            return now.modified == noted.modified
        if noted.digest is None:  # the unit is not prepared yet
            return True
        (self._verified if self._verify else self._touched).append(unit.name)
        return digest_parts(unit.parts) == noted.digest

    def _noted(self, unit: Unit) -> InputState | None:
        for folder in (self._folder, self._folder / CANDIDATES):
            if (sidecar := load_sidecar(folder, unit.name)) and sidecar.input_state:
                return sidecar.input_state
        return self._plan.input_states.get(unit.name)

    def tell(self, num_units: int) -> None:
        """Logs which units were accepted as unchanged, and why."""
        if self._touched:
            get_logger().info("%d of %d units: times differ, bytes are the same", len(self._touched), num_units)
        if self._verify:
            get_logger().info("%d of %d units: every byte is unchanged", len(self._verified), num_units)
        if self._verify and self._remote:
            get_logger().warning("%d units: compared only by size and tag of remote files", len(self._remote))
