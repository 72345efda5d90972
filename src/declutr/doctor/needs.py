"""Needs of a run, computed from its configuration without loading weights."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForMaskedLM

from declutr.pipeline.shards.content import AudioContent, ImagesContent
from declutr.pipeline.shards.manifest import TOKENIZER, load_manifest
from declutr.pipeline.tokenizer.tokenization import load_tokenizer
from declutr.trainer.model.frontend import embedding_width
from declutr.trainer.model.language_model import load_hf_config
from declutr.trainer.objectives.base import implementation_of
from declutr.trainer.setup.cache import data_folder
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.setup.tasks import new_frontend

_WEIGHT_BYTES = 4
_MOMENTS_BYTES = 8  # AdamW's two moments of a parameter, float32


@dataclass(frozen=True)
class Needs:
    """Needs of a run.

    Attributes:
        parameters: parameters of encoder, projection, objectives and frontends; shared ones count once.
        optimized: parameters of each optimizer, added up; tasks with alternating updates have one each.
        checkpoints: maximum number on the disk at one time: kept ones, and the one being written.
        workers: processes that train.
        cpus_per_worker: CPUs that each worker reserves.
        data_cpus: CPUs for reading tasks.
        gpus: GPUs required to start; 0: none, or as available.
        wishes_gpus: whether it uses GPUs if there is one for every worker.
    """

    parameters: int
    optimized: int
    checkpoints: int
    workers: int
    cpus_per_worker: int
    data_cpus: int
    gpus: int
    wishes_gpus: bool

    @property
    def cpus(self) -> int:
        """CPUs required; with fewer, workers and reading tasks wait for each other without a message."""
        return self.workers * self.cpus_per_worker + self.data_cpus

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint."""
        return self.parameters * _WEIGHT_BYTES + self.optimized * _MOMENTS_BYTES

    @property
    def disk_bytes(self) -> int:
        """Maximum size of the run's checkpoints."""
        return self.checkpoint_bytes * self.checkpoints

    @property
    def worker_bytes(self) -> int:
        """Memory of a worker's weights, gradients and moments, without activations."""
        return self.parameters * 2 * _WEIGHT_BYTES + self.optimized * _MOMENTS_BYTES


def needs_of(config: TrainConfig) -> Needs:
    """Compute the needs of a run.

    Raises:
        OSError, ValueError, KeyError, TypeError: the encoder cannot be described; trainer/driver/checks.py gives
        reasons.
    """
    scaling = config.scaling
    encoder, *tasks = _sizes(config)
    updates = 1 if config.task_schedule == "joint" else len(tasks)
    return Needs(
        parameters=encoder + sum(tasks),
        optimized=updates * encoder + sum(tasks),
        checkpoints=_checkpoints(config),
        workers=scaling.least_workers,
        cpus_per_worker=scaling.cpus_per_worker,
        data_cpus=scaling.data_cpus,
        gpus=scaling.least_workers if scaling.device == "cuda" else 0,
        wishes_gpus=scaling.device == "auto",
    )


def _checkpoints(config: TrainConfig) -> int:
    """Count the last checkpoints, milestones, the best, and the one being written."""
    saving, validation = config.checkpoint, config.validation
    number = saving.keep_last + 1
    if validation.every_steps:
        number += 1
    if saving.keep_every_steps is not None:
        sizes = [
            load_manifest(data_folder(place, config.cache)).totals["kept_train"] if config.steps is None else 0
            for place in config.places
        ]
        plan = config.plan([round(config.data_fraction * size) for size in sizes])
        number += config.total_steps(plan) // saving.keep_every_steps
    return number


def _sizes(config: TrainConfig) -> list[int]:
    """Number of parameters of the encoder with its projection; of each task's objective and frontend."""
    encoder = config.encoder
    vocabulary, ids = 0, {}
    if encoder.pretrained is None:
        tokenizer = load_tokenizer(str(data_folder(config.places[0], config.cache) / TOKENIZER))
        vocabulary, ids = len(tokenizer), {"pad_token_id": tokenizer.pad_token_id}
    hf = load_hf_config(encoder, vocabulary, ids)
    with torch.device("meta"):  # shapes only
        model = AutoModelForMaskedLM.from_config(hf, trust_remote_code=encoder.trust_remote_code)
        size, number = int(hf.hidden_size), _count(model)
        if encoder.projection.kind != "none":
            hidden, size = size, encoder.projection.size
            number += (hidden + 1) * size + (size + 1) * size
        found = [number]
        for one in config.tasks().values():
            objective = implementation_of(one.objective)(one.objective, one.context("drop"), size)
            found.append(_count(objective) + _frontend_size(one, embedding_width(model)))
    return found


def _frontend_size(task: TrainConfig, width: int) -> int:
    settings = task.context("drop").frontend
    if settings is None:
        return 0
    content = load_manifest(data_folder(task.places[0], task.cache)).content
    if not isinstance(content, ImagesContent | AudioContent):
        return 0
    return _count(new_frontend(settings, content, width, task.seed))


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
