"""Builds the tasks of a run and the train steps that update the encoder in turn."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForMaskedLM

from declutr.pipeline.shards.content import AnyContent, AudioContent, ImagesContent
from declutr.pipeline.shards.manifest import Manifest
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.freezing import frozen_parameters
from declutr.trainer.model.frontend import Frontend, embedding_width, load_vit
from declutr.trainer.model.language_model import load_hf_config
from declutr.trainer.objectives.base import implementation_of
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.fixedpoint import FixedPointReducer
from declutr.trainer.parallel.overlap import BucketedReducer
from declutr.trainer.parallel.sharding import shard
from declutr.trainer.setup.build import build_objective, load_tokenizer
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.microbatch import Microbatch
from declutr.trainer.step.nonfinite_losses import NonFiniteLosses
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask


def build_task(
    config: TrainConfig, name: str, encoder: Encoder, manifest: Manifest, comm: Communicator, microbatch: Microbatch
) -> TrainTask:
    """The parts of one of `config.tasks()`; the main one has the name "".

    Raises:
        UsageError: its objective cannot be built.
        EncoderError: the ViT that it names does not fit.
    """
    settings = config.tasks()[name]
    return TrainTask(
        encoder=encoder,
        objective=build_objective(settings, encoder, manifest),
        comm=comm,
        seed=settings.seed,
        microbatch=microbatch,
        autocast=autocast_type(config.precision, next(encoder.parameters()).device),
        name=name,
        frontend=build_frontend(settings, encoder, manifest.content),
        weight=config.auxiliary_tasks[name].weight if name else 1.0,
    )


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """Type of the forward's matrix products for the setting `precision`; None for the parameters' type."""
    if precision == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if half else None
    return torch.bfloat16 if precision == "bf16" else None


def build_train_steps(config: TrainConfig, tasks: Sequence[TrainTask], total_steps: int) -> list[TrainStep]:
    """Freezes unused parameters of the encoder, shards the others if configured, and builds optimizers and train_steps.

    Args:
        config: of the run.
        tasks: the main task and the additional ones.
        total_steps: number of steps of the run.

    Returns:
        The train steps in the order of their updates; the last is that of the main task.
    """
    encoder, settings = tasks[0].encoder, config.tasks()
    freeze_unused(encoder, tasks)
    if config.scaling.fsdp:
        shard(encoder, tasks[0].comm)
    groups = [tasks] if config.task_schedule == "joint" else [[task] for task in (*tasks[1:], tasks[0])]
    return [_train_step(config, settings[group[0].name].optim, group, total_steps) for group in groups]


def _train_step(config: TrainConfig, optim: OptimConfig, tasks: Sequence[TrainTask], total_steps: int) -> TrainStep:
    """A train step whose update has the gradients of these tasks."""
    modules: list[nn.Module] = [module for task in tasks for module in (task.objective, task.frontend) if module]
    reached = used_parameters(tasks[0].encoder, tasks)
    optimizer = build_optimizer(optim, tasks[0].encoder, *modules, reached=reached)
    encoder = tasks[0].encoder
    keeps = any(task.objective.remembers or len(list(task.objective.buffers())) for task in tasks)
    late = next(encoder.parameters()).is_cuda and not encoder.sharded and not keeps  # as `TrainStep.late` allows
    return TrainStep(
        tasks=tuple(_with_reducer(config, optimizer, tasks)),
        optimizer=optimizer,
        optim=optim,
        total_steps=total_steps,
        late=late,
        nonfinite_losses=NonFiniteLosses(config.on_nonfinite_loss == "skip", config.max_skipped_steps),
    )


def _with_reducer(config: TrainConfig, optimizer: torch.optim.Optimizer, tasks: Sequence[TrainTask]) -> list[TrainTask]:
    """The tasks of an update, with the sums of its gradients if they are not the ordinary ones."""
    comm, encoder = tasks[0].comm, tasks[0].encoder
    if comm.deterministic:
        settings = config.tasks()
        num_terms = sum(settings[task.name].num_canonical + 1 for task in tasks)  # one of the objective
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        reducer = FixedPointReducer(comm, parameters, num_terms)
        return [replace(task, reducer=reducer) for task in tasks]
    compressed = torch.bfloat16 if config.scaling.reduce_dtype == "bf16" else None
    # on CPUs there is nothing to overlap, and the order of terms, thus their rounding, stays as it was
    if comm.size == 1 or encoder.sharded or (compressed is None and not next(encoder.parameters()).is_cuda):
        return list(tasks)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    body = list(encoder.model.base_model.parameters())
    layers = {id(p) for p in body}
    # the last microbatch may have no token to predict, so heads are sent last, after what every microbatch reaches
    heads = [p for p in encoder.parameters() if id(p) not in layers]
    frontends = [p for task in tasks if task.frontend for p in task.frontend.parameters()]
    parameters = [p for p in (*heads, *frontends, *body) if id(p) in trained]
    *first, last = tasks
    return [*first, replace(last, overlap=BucketedReducer(comm, parameters, compressed))]


def freeze_unused(encoder: Encoder, tasks: Sequence[TrainTask]) -> None:
    """Freezes parameters that no objective trains, so that weight decay does not change them either."""
    used = used_parameters(encoder, tasks)
    for parameter in encoder.parameters():
        parameter.requires_grad_(id(parameter) in used)


def used_parameters(encoder: Encoder, tasks: Sequence[TrainTask]) -> set[int]:
    """Ids of the encoder's parameters that the tasks train; tasks with a frontend skip its embeddings."""
    embeddings = getattr(encoder.model.base_model, "embeddings", None)
    skipped = {id(p) for p in embeddings.parameters()} if embeddings is not None else set()
    used: set[int] = set()
    for task in tasks:
        body = {id(p) for p in encoder.model.base_model.parameters()}
        used |= body if task.frontend is None else body - skipped
        if task.objective.config.embeds:
            used |= {id(p) for part in (encoder.behind, encoder.projection) for p in part.parameters()}
        if task.objective.config.mlm:
            used |= {id(p) for p in encoder.model.parameters()}
    return used - {id(p) for p in frozen_parameters(encoder.model, encoder.config.num_trainable_layers)}


def build_frontend(config: TrainConfig, encoder: Encoder, content: AnyContent) -> Frontend | None:
    """The frontend of a task with images or sounds; None for texts. Its weights are the same on every worker.

    Args:
        config: configuration of the task.
        encoder: the encoder whose layers follow.
        content: content of the task's shards.

    Raises:
        EncoderError: the ViT that it names does not fit.
    """
    settings = config.context("drop").frontend
    if settings is None or not isinstance(content, ImagesContent | AudioContent):
        return None
    frontend = new_frontend(settings, content, embedding_width(encoder.model), config.seed)
    if settings.pretrained is not None:
        load_vit(frontend)
    parameter = next(encoder.parameters())
    return frontend.to(parameter.device, parameter.dtype).train()


def new_frontend(settings: FrontendConfig, content: ImagesContent | AudioContent, width: int, seed: int) -> Frontend:
    """A frontend with new weights.

    Args:
        settings: of the frontend.
        content: of the shards; it decides the size of a patch and the largest number of patches.
        width: size of the hidden states.
        seed: of the weights.
    """
    deep, wide = settings.patch_size
    if isinstance(content, ImagesContent):
        places = (settings.image_size // deep) * (settings.image_size // wide)
        return Frontend(settings, 3 * deep * wide, places, width, seed, (0.5, 0.5))
    frames = int(content.max_seconds * 1000 / content.hop_length_ms)
    return Frontend(settings, deep * wide, max(1, frames // deep) * (content.num_mel_bins // wide), width, seed)


def parameter_counts(config: TrainConfig, shards: Path, manifests: Mapping[str, Manifest]) -> list[int]:
    """Number of parameters of the encoder with its projection; of each task's objective and frontend. Loads no weights.

    Args:
        config: of a run without problems.
        shards: folder of the main task's shards, whose tokenizer gives a new encoder its vocabulary.
        manifests: of each task's shards.
    """
    encoder, vocabulary, ids = config.encoder, 0, {}
    if encoder.pretrained is None:
        tokenizer, _ = load_tokenizer(shards, manifests[""])
        vocabulary, ids = len(tokenizer), {"pad_token_id": tokenizer.pad_token_id}
    hf = load_hf_config(encoder, vocabulary, ids)
    with torch.device("meta"):  # shapes only
        model = AutoModelForMaskedLM.from_config(hf, trust_remote_code=encoder.trust_remote_code)
        size, extra = int(hf.hidden_size), 0
        if encoder.projection.kind != "none":
            hidden, size = size, encoder.projection.size
            extra = (hidden + 1) * size + (size + 1) * size
        modules: list[list[nn.Module]] = [[model]]
        for name, task in config.tasks().items():
            context, content = task.context("drop"), manifests[name].content
            modules.append([implementation_of(task.objective)(task.objective, context, size)])
            if context.frontend is not None and isinstance(content, ImagesContent | AudioContent):
                modules[-1].append(new_frontend(context.frontend, content, embedding_width(model), task.seed))
    first, *rest = [sum(weight.numel() for part in parts for weight in part.parameters()) for parts in modules]
    return [first + extra, *rest]
