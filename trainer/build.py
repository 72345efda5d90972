"""Builds what a worker trains with, from the plan of its run. No Ray: checks and benchmarks use it too."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

from declutr.common import seeding
from declutr.common.errors import ShardError, UsageError
from declutr.common.paths import expand
from declutr.pipeline.media.clips import frame_samples
from declutr.pipeline.shards.content import AnyContent, AudioContent, ImagesContent
from declutr.pipeline.shards.manifest import TOKENIZER, Manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet, tokenizer_problem
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.pipeline.tokenizer.tokenization import fingerprint
from declutr.trainer.config import TaskSettings, TrainConfig
from declutr.trainer.data.batches import Collator
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.metrics.judged_pairs import FILES, read_pairs
from declutr.trainer.metrics.sts import StsValidator
from declutr.trainer.model.behind import read_behind, read_prompts
from declutr.trainer.model.config import EncoderConfig, FrontendConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.frontend import Frontend, embedding_width, load_vit
from declutr.trainer.model.language_model import (
    frozen_parameters,
    load_hf_config,
    load_model,
    load_shapes,
    load_with_dropout_layers,
    max_span_tokens,
    special_ids,
    vocabulary_of,
)
from declutr.trainer.model.layouts import fitting_layout
from declutr.trainer.objectives.base import HeldOutSplit, Objective, Validator, implementation_of
from declutr.trainer.parallel.communicator import Communicator, shard
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.run import RunPlan, data_folder
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import NonFiniteLosses, TrainStep
from declutr.trainer.step.task import TrainTask


@dataclass(frozen=True)
class Parts:
    """The parts that a worker trains: encoder and tasks, and what reads their shards."""

    tokenizer: Any  # the tokenizer of the main task's shards
    encoder: Encoder  # trained by every task
    tasks: tuple[TrainTask, ...]  # the main task first
    collators: Mapping[str, Collator]  # the collator of each task, by the task's name


def build_parts(
    plan: RunPlan,  # plan of the run
    comm: Communicator,  # the workers
    to: torch.device | torch.dtype,  # device or type of the parameters
    microbatch: Microbatch | None = None,  # size of a forward; None: that of the configuration
) -> Parts:
    """Builds encoder, tasks and collators."""
    config = plan.config
    tokenizer, vocabulary = load_tokenizer(plan.data[""][0], plan.manifest, config.encoder)
    encoder = build_encoder(config, tokenizer).to(to).train()
    encoder.experimental = config.scaling.experimental
    device = next(encoder.parameters()).device
    microbatch = microbatch or Microbatch.of(config.microbatch_tokens, device)
    tasks = tuple(
        TrainTask(
            encoder=encoder,
            objective=build_objective(task, encoder, plan.manifests[name].short_documents),
            comm=comm,
            seed=task.seed,
            microbatch=microbatch,
            autocast=autocast_type(config.precision, device),
            name=name,
            frontend=build_frontend(task, encoder, plan.manifests[name].content),
            weight=task.weight,
        )
        for name, task in plan.tasks.items()
    )
    collators = {task.name: task.objective.collator(vocabulary, max_content(encoder, vocabulary)) for task in tasks}
    return Parts(tokenizer, encoder, tasks, collators)


def load_tokenizer(
    folder: Path,  # the shards
    manifest: Manifest | None = None,  # the shards' manifest; None: it is read from the folder
    encoder: EncoderConfig | None = None,  # settings with the prompts before the spans; None: there are none
) -> tuple[Any, Vocabulary]:
    """The tokenizer that made the shards of a folder, and its ids."""
    if problem := tokenizer_problem(folder):
        raise ShardError(problem)
    tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER, trust_remote_code=False)
    if fingerprint(tokenizer) != (manifest or load_manifest(folder)).text_tokenizer.fingerprint:
        raise ShardError(f"the tokenizer in {folder / TOKENIZER} is not the one that made the shards")
    prompts = (encoder.prompt or "", encoder.query_prompt) if encoder else ()
    return tokenizer, vocabulary_of(tokenizer, *prompts)


def build_encoder(config: TrainConfig, tokenizer: Any) -> Encoder:
    """The untrained encoder of a configuration, in a fitting layout; weights from scratch are equal on every worker."""
    hf = load_hf_config(config.encoder, len(tokenizer), special_ids(tokenizer))
    objectives = [task.objective for task in config.tasks().values()]
    load = load_with_dropout_layers if any(objective.sets_rates for objective in objectives) else load_model
    model, load_report = load(config.encoder, hf, config.seed)
    settings = config.encoder
    if config.scaling.elastic_determinism:  # compiled kernels depend on the lengths seen before
        settings = settings.model_copy(update={"compile": False})
    encoder = Encoder(settings, model, config.seed, load_report, read_behind(config.encoder.pretrained))
    encoder.prompts = read_prompts(config.encoder.pretrained)
    layout = fitting_layout(encoder, any(objective.mlm for objective in objectives))
    encoder.set_layout(settings.model_copy(update={"layout": layout}))
    # The model's settings have the sizes, as in published encoders; sizes of an earlier training are removed.
    matryoshka, stored = config.objective.matryoshka, encoder.model.config
    if matryoshka is not None:
        stored.matryoshka_dimensions = sorted(size for size, _ in matryoshka.cuts(encoder.output_size))
    elif hasattr(stored, "matryoshka_dimensions"):
        del stored.matryoshka_dimensions
    return encoder


def build_objective(task: TaskSettings, encoder: Encoder, short_documents: ShortDocuments) -> Objective[Any]:
    """The objective, with the encoder's device and precision; its weights are the same on every worker."""
    kind = implementation_of(task.objective)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.torch_seed(task.seed, "objective"))
        try:
            objective = kind(task.objective, task.context(short_documents), encoder.embedding_size)
        except (Exception, SystemExit) as error:  # of any package; a restart would raise it again
            raise UsageError(
                f"objective {task.objective.kind}: {kind.__name__}(...) raised {type(error).__name__}: {error}"
            ) from error
    parameter = next(encoder.parameters())
    return objective.to(parameter.device, parameter.dtype).train()


def autocast_type(precision: str, device: torch.device) -> torch.dtype | None:
    """Type of the forward's matrix products for the setting `precision`; None for the parameters' type."""
    use_bf16 = has_bf16(device) if precision == "auto" else precision == "bf16"
    return torch.bfloat16 if use_bf16 else None


def has_bf16(device: torch.device) -> bool:
    """True if a device has units of its own for products in bfloat16: a GPU's, or AMX or AVX-512 of this machine's CPU.

    Another CPU takes longer for them than for those in float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # a CPU with AMX has these units of AVX-512, too
    has_units = torch.backends.mkldnn.is_available() and bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return has_units and allows_bf16(os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL"))


def allows_bf16(max_isa: str) -> bool:
    """True if `ONEDNN_MAX_CPU_ISA` lets oneDNN, which computes a CPU's products in bfloat16, use units for them."""
    return max_isa.upper() in ("ALL", "DEFAULT") or any(unit in max_isa.upper() for unit in ("BF16", "FP16", "AMX"))


def build_train_steps(
    plan: RunPlan,  # plan of the run
    tasks: Sequence[TrainTask],  # the main task and the additional ones
    total_steps: int,  # number of steps of the run
) -> list[TrainStep]:
    """Freezes unused parameters of the encoder, shards the others if configured, and builds train steps.

    Returns:
        The train steps in the order of their updates; the last is that of the main task.
    """
    encoder, config = tasks[0].encoder, plan.config
    freeze_unused(encoder, tasks)
    if config.scaling.fsdp:
        shard(encoder, tasks[0].comm)
    groups = [tasks] if config.task_schedule == "joint" else [[task] for task in (*tasks[1:], tasks[0])]
    return [_train_step(plan, plan.tasks[group[0].name].optim, group, total_steps) for group in groups]


def _train_step(plan: RunPlan, optim: OptimConfig, tasks: Sequence[TrainTask], total_steps: int) -> TrainStep:
    """A train step whose update has the gradients of these tasks."""
    modules: list[nn.Module] = [module for task in tasks for module in (task.objective, task.frontend) if module]
    encoder = tasks[0].encoder
    optimizer = build_optimizer(optim, encoder, *modules, reached=used_parameters(encoder, tasks))
    has_state = any(task.objective.remembers or len(list(task.objective.buffers())) for task in tasks)
    # the conditions of `TrainStep.late`
    late = next(encoder.parameters()).is_cuda and not encoder.sharded and not has_state
    return TrainStep(
        tasks=tuple(_with_reducer(plan, optimizer, tasks)),
        optimizer=optimizer,
        optim=optim,
        total_steps=total_steps,
        late=late,
        nonfinite_losses=NonFiniteLosses(plan.config.on_nonfinite_loss == "skip", plan.config.max_skipped_steps),
    )


def _with_reducer(plan: RunPlan, optimizer: torch.optim.Optimizer, tasks: Sequence[TrainTask]) -> list[TrainTask]:
    """The tasks of an update, with a reducer for its gradients unless they are summed after the backward."""
    comm, encoder = tasks[0].comm, tasks[0].encoder
    if comm.deterministic:
        num_terms = sum(plan.tasks[task.name].num_canonical + 1 for task in tasks)  # + 1: the objective's own
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        reducer = FixedPointReducer(comm, parameters, num_terms)
        return [replace(task, reducer=reducer) for task in tasks]
    compressed = torch.bfloat16 if plan.config.scaling.reduce_dtype == "bf16" else None
    # on CPUs there is nothing to overlap, and the order of terms, thus their rounding, stays as it was
    if comm.size == 1 or encoder.sharded or (compressed is None and not next(encoder.parameters()).is_cuda):
        return list(tasks)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    body = list(encoder.model.base_model.parameters())
    layers = {id(p) for p in body}
    # the reducer sends the last first; the last microbatch may have no token to predict, so heads are sent last,
    # after what every microbatch reaches
    heads = [p for p in encoder.parameters() if id(p) not in layers]
    frontends = [p for task in tasks if task.frontend for p in task.frontend.parameters()]
    parameters = [p for p in (*heads, *frontends, *body) if id(p) in trained]
    *first, last = tasks
    return [*first, replace(last, overlap=BucketedReducer(parameters, compressed))]


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


def max_content(encoder: Encoder, vocabulary: Vocabulary) -> int:
    """Largest number of tokens of a span, without specials, for which the encoder has positions."""
    return max_span_tokens(encoder.model) - vocabulary.num_specials


def build_frontend(
    task: TaskSettings,  # its frontend's settings and its seed are used
    encoder: Encoder,  # the encoder whose layers follow
    content: AnyContent,  # content of the task's shards
) -> Frontend | None:
    """The frontend of a task with images or sounds; None for texts. Its weights are the same on every worker."""
    settings = task.frontend
    if settings is None or not isinstance(content, ImagesContent | AudioContent):
        return None
    frontend = new_frontend(settings, content, embedding_width(encoder.model), task.seed)
    if settings.pretrained is not None:
        load_vit(frontend)
    parameter = next(encoder.parameters())
    return frontend.to(parameter.device, parameter.dtype).train()


def new_frontend(
    settings: FrontendConfig,  # settings of the frontend
    content: ImagesContent | AudioContent,  # content of the shards, which bounds the number of patches
    width: int,  # size of the hidden states
    seed: int,  # seed of the weights
) -> Frontend:
    """A frontend with new weights."""
    patch_rows, patch_columns = settings.patch_size  # pixels, or frames and mel bands
    if isinstance(content, ImagesContent):
        num_patches = (settings.image_size // patch_rows) * (settings.image_size // patch_columns)
        return Frontend(settings, 3 * patch_rows * patch_columns, num_patches, width, seed, (0.5, 0.5))
    frame, hop = frame_samples(content)  # whole samples, so a clip may have more frames than its time has hops
    samples = math.ceil(content.max_seconds * content.sample_rate) + 1  # resampling may add one
    frames = max(int(content.max_seconds * 1000 / content.hop_length_ms), 1 + max(0, samples - frame) // hop)
    num_patches = max(1, frames // patch_rows) * (content.num_mel_bins // patch_columns)
    return Frontend(settings, patch_rows * patch_columns, num_patches, width, seed)


def parameter_counts(plan: RunPlan) -> list[int]:
    """Parameters of the encoder with its projection; of each task's objective and frontend. Loads no weights."""
    encoder = plan.config.encoder
    model = load_shapes(encoder, load_tokenizer(plan.data[""][0], plan.manifest)[0])
    size, extra = int(model.config.hidden_size), 0
    if encoder.projection.kind != "none":
        hidden, size = size, encoder.projection.size
        extra = (hidden + 1) * size + (size + 1) * size  # two linear layers with biases
    modules: list[list[nn.Module]] = [[model]]
    with torch.device("meta"):  # shapes only
        for name, task in plan.tasks.items():
            content = plan.manifests[name].content
            modules.append([implementation_of(task.objective)(task.objective, task.context("drop"), size)])
            if task.frontend is not None and isinstance(content, ImagesContent | AudioContent):
                modules[-1].append(new_frontend(task.frontend, content, embedding_width(model), task.seed))
    first, *rest = [sum(weight.numel() for part in parts for weight in part.parameters()) for parts in modules]
    return [first + extra, *rest]


@dataclass(frozen=True)
class _Validators:
    """Several validators as one. A label comes before the names of its validator's scores and makes them numbers."""

    parts: Sequence[tuple[str, Validator]]

    def scores(self, encoder: Encoder) -> dict[str, float] | None:
        all_scores: dict[str, float] = {}
        for label, validator in self.parts:
            scores = validator.scores(encoder)
            if scores is None:
                return None
            all_scores |= {label + name: float(value) if label else value for name, value in scores.items()}
        return all_scores


def build_validator(plan: RunPlan, parts: Parts, device: torch.device) -> Validator | None:
    """The scores of a validation: the objective's on held-out rows, and those of judged pairs; None without any.

    Scores of auxiliary tasks with images or sounds are added as numbers, without rows, so they choose no checkpoint.
    """
    validation = plan.config.validation
    if not validation.every_steps:
        return None
    task, *auxiliary = parts.tasks
    if validation.data is None:
        held_out = plan.training_shards[""].held_out()
    else:
        held_out = ShardSet(data_folder(validation.data, plan.config.cache), "train", look=False)
    prompt = plan.config.encoder.prompt or ""
    vocabulary = vocabulary_of(parts.tokenizer, prompt, plan.config.encoder.query_prompt)
    room = max_content(task.encoder, vocabulary)
    settings = vocabulary, room, validation.max_documents, task.comm, device
    validators: list[tuple[str, Validator | None]] = []
    if held_out.num_documents > 1:  # all rows may be trained on if judged pairs validate
        validators.append(("", task.objective.validator(HeldOutSplit(held_out, *settings))))
    for score, folder in validation.pairs.items():
        gold, first, second = zip(*read_pairs(expand(folder), FILES[score]), strict=True)
        longest = room + vocabulary.num_specials  # longer texts are cut at the end
        texts = [prompt + text for text in (*first, *second)]
        tokens = parts.tokenizer(texts, truncation=True, max_length=longest, return_attention_mask=False)
        judged = StsValidator(
            tokens["input_ids"], list(gold), task.objective.exported(), task.comm, device, task.objective.sizes, score
        )
        validators.append(("", judged))
    for other in auxiliary:
        rows = plan.training_shards[other.name].held_out()
        split = HeldOutSplit(rows, *settings, other.frontend)
        if other.frontend is not None and rows.num_documents > 1:
            validators.append((other.label, other.objective.validator(split)))
    scored = [(label, validator) for label, validator in validators if validator is not None]
    return _Validators(scored) if scored else None
