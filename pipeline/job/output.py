"""The output folder of a preparation: its plan, its finished work and the remains of a killed run."""

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from declutr.common.config import Strict
from declutr.common.lock import LOCK
from declutr.common.storage import hash_json, write_text
from declutr.common.stores.copies import PLAN
from declutr.pipeline.config import PipelineConfig, config_hash, differing_keys, identity
from declutr.pipeline.duplicates.table import DUPLICATES
from declutr.pipeline.filters.config import fingerprints
from declutr.pipeline.filters.evaluation_sets import INDEX
from declutr.pipeline.job.estimate import ESTIMATE
from declutr.pipeline.job.progress import HEARTBEATS, PROGRESS
from declutr.pipeline.job.units import Unit, hash_unit
from declutr.pipeline.job.worker import CANDIDATES
from declutr.pipeline.readers.input_state import InputState
from declutr.pipeline.readers.skipped import Skip
from declutr.pipeline.shards.ledger import LEDGERS, REJECTED
from declutr.pipeline.shards.manifest import MANIFEST, TOKENIZER


class PreparePlan(Strict):
    """Settings and inputs of an output folder, written first so that a later run can check them."""

    config: dict[str, Any]
    config_hash: str
    units: dict[str, str]
    """Hash of each unit's inputs, by unit name."""
    files: dict[str, str]
    """Hash of other files that influence the choice, by setting."""
    sources: dict[str, str]
    """First source of each unit, by unit name, for messages on changed inputs."""
    input_states: dict[str, InputState]
    """State of each unit's inputs, by unit name."""
    skipped: dict[str, Skip] = Field(default_factory=dict)
    """Skipped files, by kind; without influence on whether a folder can be continued."""


def plan_of(config: PipelineConfig, units: Sequence[Unit], skipped: dict[str, Skip] | None = None) -> PreparePlan:
    """The plan of these settings over these inputs."""
    return PreparePlan(
        config=identity(config),
        config_hash=config_hash(config),
        units={unit.name: hash_unit(unit) for unit in units},
        files=fingerprints(config.filters),
        sources={unit.name: unit.parts[0].source for unit in units},
        input_states={unit.name: unit.input_state for unit in units if unit.input_state},
        skipped=skipped or {},
    )


def hash_plan(plan: PreparePlan) -> str:
    """SHA-256 of a plan's settings and of its inputs by name and size."""
    return hash_json([plan.config_hash, plan.units, plan.files])


def write_plan(folder: Path, plan: PreparePlan) -> None:
    """Writes the plan to the folder and removes temporary files of a killed run."""
    if not (folder / PLAN).exists():
        write_text(folder / PLAN, plan.model_dump_json(indent=1) + "\n")
    for aside in list(folder.rglob(".*.tmp")):
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Removes everything that a preparation wrote, except its lock."""
    for name in (TOKENIZER, "units", LEDGERS, REJECTED, CANDIDATES, HEARTBEATS):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in [*folder.glob("train-*.arrow"), *folder.glob("held-out-*.arrow")]:
        path.unlink()
    for name in (MANIFEST, PROGRESS, PLAN, ESTIMATE, INDEX, DUPLICATES):
        (folder / name).unlink(missing_ok=True)


def output_problems(folder: Path, names: Collection[str], config: PipelineConfig, plan: PreparePlan) -> list[str]:
    """Reasons why an output cannot be used for this plan, one line each; none if it is new or has this plan.

    Args:
        folder: the output folder; for an address, a folder with the plan that was found there.
        names: names of the files and folders in the output.
        config: settings.
        plan: plan of these settings.
    """
    where = f"output = {config.output!r}"
    if folder.exists() and not folder.is_dir():
        return [f"{where} is a file; name a folder"]
    if all(name.startswith(".") or name in ("", LOCK) for name in names):
        return []
    try:
        other = PreparePlan.model_validate_json((folder / PLAN).read_bytes())
    except FileNotFoundError:
        return [f"{where} holds files that `prepare` did not write; name an empty or a new folder"]
    except ValidationError:
        return [f"{where}: its {PLAN} is of another version; name another folder or delete this one"]
    if other.config_hash != plan.config_hash:
        differing = "; ".join(differing_keys(config, other.config))
        return [f"{where} was made with other settings ({differing}); name another folder or delete this one"]
    if other.files != plan.files:
        changed = sorted(key for key in plan.files if plan.files[key] != other.files.get(key))
        return [f"{where} was made with other contents of the files of {', '.join(changed)}; name another folder"]
    # Installed packages change often; documentation prepared from earlier versions stays valid.
    if plan.units == other.units or (config.corpus.kind == "python_docs" and (folder / MANIFEST).exists()):
        return []
    changed = sorted(
        name for name in plan.units.keys() | other.units.keys() if plan.units.get(name) != other.units.get(name)
    )
    first = plan.sources.get(changed[0]) or other.sources[changed[0]]
    return [
        f"{where} was started with other inputs: {len(changed)} of {len(plan.units)} units changed, the first at "
        f"{first}; name another folder or delete this one"
    ]
