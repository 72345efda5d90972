"""Builds the branches of a run and the steppers that update the encoder in turn."""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import nn

from pipeline.shards.content import AnyContent, AudioContent, ImagesContent
from pipeline.shards.manifest import Manifest
from trainer.model.encoder import Encoder
from trainer.model.freezing import frozen_parameters
from trainer.model.frontend import Frontend, embedding_width, load_vit
from trainer.model.settings import FrontendConfig
from trainer.parallel.fixedpoint import FixedPointSums
from trainer.parallel.overlap import OverlappedSums
from trainer.parallel.sharding import shard
from trainer.parallel.world import World
from trainer.setup.build import build_objective
from trainer.setup.config import TrainConfig
from trainer.step.branch import Branch
from trainer.step.microbatch import Microbatch
from trainer.step.optim import build_optimizer
from trainer.step.settings import OptimConfig
from trainer.step.step import Stepper


def build_branch(
    config: TrainConfig, name: str, encoder: Encoder, manifest: Manifest, world: World, microbatch: Microbatch
) -> Branch:
    """The parts of one of `config.branches()`; the main one has the name "".

    Raises:
        ObjectiveError: its objective cannot be built.
        UnfitEncoderError: the ViT that it names does not fit.
    """
    settings = config.branches()[name]
    return Branch(
        encoder=encoder,
        objective=build_objective(settings, encoder, manifest),
        world=world,
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


def build_turns(config: TrainConfig, branches: Sequence[Branch], total_steps: int) -> list[Stepper]:
    """Freezes unused parameters of the encoder, shards the others if configured, and builds optimizers and steppers.

    Args:
        config: of the run.
        branches: the main branch and the additional ones.
        total_steps: number of steps of the run.

    Returns:
        The steppers in the order of their turns; the last is that of the main branch.
    """
    main, *others = branches
    encoder = main.encoder
    freeze_unused(encoder, branches)
    if config.scaling.fsdp:
        shard(encoder, main.world)
    if config.task_schedule == "joint":
        return [_stepper(config, config.optim, [main, *others], total_steps)]
    settings = config.branches()
    return [_stepper(config, settings[branch.name].optim, [branch], total_steps) for branch in (*others, main)]


def _stepper(config: TrainConfig, optim: OptimConfig, branches: Sequence[Branch], total_steps: int) -> Stepper:
    """A stepper whose update has the gradients of these branches."""
    modules: list[nn.Module] = [one for branch in branches for one in (branch.objective, branch.frontend) if one]
    reached = used_parameters(branches[0].encoder, branches)
    optimizer = build_optimizer(optim, branches[0].encoder, *modules, reached=reached)
    branches = _with_sums(config, optimizer, branches)
    main, *joined = branches
    return Stepper(
        **{each.name: getattr(main, each.name) for each in fields(main)},
        optimizer=optimizer,
        optim=optim,
        total_steps=total_steps,
        joined=tuple(joined),
        late=_reads_late(branches),
    )


def _with_sums(config: TrainConfig, optimizer: torch.optim.Optimizer, branches: Sequence[Branch]) -> list[Branch]:
    """The branches of an update, with the sums of its gradients if they are not the ordinary ones."""
    world, encoder = branches[0].world, branches[0].encoder
    if world.deterministic:
        settings = config.branches()
        num_terms = sum(settings[branch.name].num_units + 1 for branch in branches)  # one of the objective
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sums = FixedPointSums(world, parameters, num_terms)
        return [replace(branch, sums=sums) for branch in branches]
    compressed = torch.bfloat16 if config.scaling.reduce_dtype == "bf16" else None
    # on CPUs there is nothing to overlap, and the order of terms, thus their rounding, stays as it was
    if world.size == 1 or encoder.sharded or (compressed is None and not next(encoder.parameters()).is_cuda):
        return list(branches)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    body = list(encoder.model.base_model.parameters())
    layers = {id(p) for p in body}
    # the last microbatch may have no token to predict, so heads are sent last, after what every microbatch reaches
    heads = [p for p in encoder.parameters() if id(p) not in layers]
    frontends = [p for one in branches if one.frontend for p in one.frontend.parameters()]
    parameters = [p for p in (*heads, *frontends, *body) if id(p) in trained]
    *first, last = branches
    return [*first, replace(last, overlap=OverlappedSums(world, parameters, compressed))]


def _reads_late(branches: Sequence[Branch]) -> bool:
    """True if the metrics of a step may be read after its update, as `Stepper.late` allows."""
    encoder = branches[0].encoder
    keeps = any(branch.objective.remembers or len(list(branch.objective.buffers())) for branch in branches)
    return next(encoder.parameters()).is_cuda and not encoder.sharded and not keeps


def freeze_unused(encoder: Encoder, branches: Sequence[Branch]) -> None:
    """Freezes parameters that no objective trains, so that weight decay does not change them either."""
    used = used_parameters(encoder, branches)
    for parameter in encoder.parameters():
        parameter.requires_grad_(id(parameter) in used)


def used_parameters(encoder: Encoder, branches: Sequence[Branch]) -> set[int]:
    """Ids of the encoder's parameters that the branches train; branches with a frontend skip its embeddings."""
    embeddings = getattr(encoder.model.base_model, "embeddings", None)
    skipped = {id(p) for p in embeddings.parameters()} if embeddings is not None else set()
    used: set[int] = set()
    for branch in branches:
        body = {id(p) for p in encoder.model.base_model.parameters()}
        used |= body if branch.frontend is None else body - skipped
        if branch.objective.config.embeds:
            used |= {id(p) for part in (encoder.behind, encoder.projection) for p in part.parameters()}
        if branch.objective.config.mlm:
            used |= {id(p) for p in encoder.model.parameters()}
    return used - {id(p) for p in frozen_parameters(encoder.model, encoder.config.num_trainable_layers)}


def build_frontend(config: TrainConfig, encoder: Encoder, content: AnyContent) -> Frontend | None:
    """The frontend of a branch with images or sounds; None for texts. Its weights are the same on every worker.

    Args:
        config: configuration of the branch.
        encoder: the encoder whose layers follow.
        content: content of the branch's shards.

    Raises:
        UnfitEncoderError: the ViT that it names does not fit.
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
