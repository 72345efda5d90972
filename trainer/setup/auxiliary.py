"""The `auxiliary_tasks` section: auxiliary tasks of a run, each with its own data, objective and batch."""

from collections.abc import Mapping

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.storage import hash_json
from declutr.pipeline.shards.manifest import Manifest, data_hash
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.registry import DEFAULT, AnyObjectiveConfig
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.step.config import OptimConfig


class AuxiliaryTaskConfig(Strict):
    """A task that trains the same encoder on other data, in every step of the run."""

    data: str
    """Folder of its prepared shards, or their address."""
    objective: AnyObjectiveConfig = DEFAULT
    spans: SpanConfig = SpanConfig()
    batch_documents: int = Field(default=16, ge=1)
    """Number of its rows in one step over all workers."""
    weight: float = Field(default=1.0, ge=0)
    """Factor of its loss. With `task_schedule: alternating`, AdamW cancels it except in clipping."""
    optim: OptimConfig | None = None
    """Its own optimizer, with `task_schedule: alternating`; null: the same settings as the run's `optim`."""
    frontend: FrontendConfig = FrontendConfig()


def data_hashes(manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """Identity of each task's data by its name; the main task has the name ""."""
    return {name: data_hash(manifest) for name, manifest in manifests.items()}


def joint_hash(hashes: Mapping[str, str]) -> str:
    """Identity of a run's data, from `data_hashes`."""
    return hashes[""] if len(hashes) == 1 else hash_json(hashes)
