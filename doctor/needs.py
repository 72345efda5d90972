"""What a run of a configuration asks of the machines, without its weights."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForMaskedLM

from pipeline.shards.manifest import TOKENIZER, load_manifest
from pipeline.tokenizer.tokenization import load_tokenizer
from trainer.data.plan import Plan
from trainer.model.language_model import load_hf_config
from trainer.setup.build import total_steps
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig

_BYTES_SAVED = 12  # a parameter and AdamW's two moments, float32
_BYTES_HELD = 16  # and its gradient


@dataclass(frozen=True)
class Needs:
    """What a run asks for.

    Attributes:
        parameters: of the encoder and the projection, shared ones once.
        checkpoints: most that are on the disk at one time: those that are kept, and the one being written.
        workers: processes that train.
        cpus_per_worker: CPUs each of them reserves.
        storage_threads: CPUs for the tasks that read.
        gpus: GPUs without which it does not start; 0: none, or it takes what there is.
        wishes_gpus: it takes GPUs if there is one for every worker.
    """

    parameters: int
    checkpoints: int
    workers: int
    cpus_per_worker: int
    storage_threads: int
    gpus: int
    wishes_gpus: bool

    @property
    def cpus(self) -> int:
        """CPUs without which workers and the tasks that read for them wait for each other, without a word."""
        return self.workers * self.cpus_per_worker + self.storage_threads

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint."""
        return self.parameters * _BYTES_SAVED

    @property
    def disk_bytes(self) -> int:
        """Most that the run's checkpoints take."""
        return self.checkpoint_bytes * self.checkpoints

    @property
    def worker_bytes(self) -> int:
        """Memory of a worker's weights, gradients and moments, without activations."""
        return self.parameters * _BYTES_HELD


def needs_of(config: TrainConfig) -> Needs:
    """What this run asks for.

    Raises:
        OSError, ValueError, KeyError, TypeError: the encoder cannot be described; trainer/driver/checks.py says why.
    """
    scaling = config.scaling
    return Needs(
        parameters=_parameters(config),
        checkpoints=_checkpoints(config),
        workers=scaling.least_workers,
        cpus_per_worker=scaling.cpus_per_worker,
        storage_threads=scaling.storage_threads,
        gpus=scaling.least_workers if scaling.device == "cuda" else 0,
        wishes_gpus=scaling.device == "auto",
    )


def _checkpoints(config: TrainConfig) -> int:
    """The last, milestones, the best, one that a follower is at, and the one being written."""
    saving, validation = config.checkpoint, config.validation
    number = saving.keep_last + 1
    if validation.score == "followed":
        number += 2
    elif validation.every_steps:
        number += 1
    if saving.keep_every_steps is not None:
        documents = (
            load_manifest(data_folder(config.data, config.cache)).totals["kept_train"] if config.steps is None else 0
        )
        number += total_steps(config, Plan(config.seed, documents, config.batch_documents)) // saving.keep_every_steps
    return number


def _parameters(config: TrainConfig) -> int:
    encoder = config.encoder
    vocabulary, ids = 0, {}
    if encoder.pretrained is None:
        tokenizer = load_tokenizer(str(data_folder(config.data, config.cache) / TOKENIZER))
        vocabulary, ids = len(tokenizer), {"pad_token_id": tokenizer.pad_token_id}
    hf = load_hf_config(encoder, vocabulary, ids)
    with torch.device("meta"):  # shapes only
        model = AutoModelForMaskedLM.from_config(hf, trust_remote_code=encoder.trust_remote_code)
    number: int = sum(parameter.numel() for parameter in model.parameters())
    if encoder.projection.kind != "none":
        hidden, size = int(hf.hidden_size), encoder.projection.size
        number += (hidden + 1) * size + (size + 1) * size
    return number
