"""Checks a run's encoder and its auxiliary tasks before Ray starts: tokenizer, vocabulary, positions, weights."""

from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError
from torch.nn import Dropout

from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, DamagedError, EncoderError, UsageError
from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.pipeline.shards.manifest import TOKENIZER
from declutr.pipeline.shards.shards import tokenizer_problem
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer
from declutr.trainer.build import build_encoder, build_frontend, build_objective
from declutr.trainer.build import load_tokenizer as tokenizer_of_shards
from declutr.trainer.config import TaskSettings
from declutr.trainer.data.packedbatch import limit
from declutr.trainer.driver.checks import objective_problems
from declutr.trainer.model.behind import left_out, read_prompts
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder, mlm_head
from declutr.trainer.model.language_model import (
    FAMILIES,
    frozen_parameters,
    load_shapes,
    max_span_tokens,
    vocabulary_of,
)
from declutr.trainer.model.layouts import drops_by_key, patch_problem
from declutr.trainer.objectives.base import Objective
from declutr.trainer.run import RunPlan

_PROBED_RATE = 0.1  # of dropout
# Errors of transformers when a model cannot be built or its files cannot be read.
_UNLOADABLE = (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


def encoder_problems(
    plan: RunPlan,  # of a run without problems that its files show, and without a checkpoint
    name: str = "",  # of an auxiliary task that reads texts
) -> list[str]:
    """Problems of the encoder, its vocabulary, positions and weights, one line each."""
    task = plan.tasks[name]
    advice = f" ({task.objective.without_mlm} trains without MLM)"
    return [line + advice if "without MLM" in line else line for line in _problems(plan, task)]


def _problems(plan: RunPlan, task: TaskSettings) -> list[str]:
    encoder, info = plan.config.encoder, plan.manifests[task.name].tokenizer
    if info is None:  # images or audio, which kind_problem reports
        return []
    folder = plan.data[task.name][0] / TOKENIZER
    if problem := tokenizer_problem(folder.parent):
        return [f"data = {task.places[0]}: {problem}"]
    try:
        tokenizer = load_tokenizer(str(folder))
    except ConfigError:
        return [f"data = {task.places[0]}: {folder} holds no tokenizer that can be loaded; prepare the corpus again"]
    problems = [*_prompt_problems(encoder)]
    if fingerprint(tokenizer) != info.fingerprint:
        problems.append(f"data = {task.places[0]}: the tokenizer in {folder} is not the one that made the shards")
    try:
        if vocabulary_of(tokenizer).bos is None and encoder.pooling == "mean_without_cls":
            problems.append(
                "encoder.pooling = mean_without_cls: the shards' tokenizer puts no special token before a text, so its "
                "first word would be left out; set it to mean"
            )
        if encoder.pretrained is not None:
            own = fingerprint(load_tokenizer(encoder.pretrained, encoder.trust_remote_code))
            if own != info.fingerprint:
                problems.append(
                    f"encoder.pretrained = {encoder.pretrained}: its tokenizer ({own[:12]}) is not the one that made "
                    f"the shards ({info.fingerprint[:12]}); prepare the corpus with it: "
                    f"'tokenizer={{kind: pretrained, name: {encoder.pretrained}}}'"
                )
        model = load_shapes(encoder, tokenizer)  # a model that cannot be built is found here, not on every worker
        if task.objective.mlm:
            mlm_head(model)
        frozen_parameters(model, encoder.num_trainable_layers)
    except ConfigError as error:
        return [*problems, *(f"encoder: {problem}" for problem in error.problems)]
    except _UNLOADABLE as error:
        return [*problems, _unloadable(encoder, error)]
    if model.config.vocab_size < info.vocab_size:
        problems.append(
            f"encoder: its vocabulary of {model.config.vocab_size} is smaller than the shards' tokenizer's "
            f"{info.vocab_size}; token ids up to {info.vocab_size - 1} would be beyond it"
        )
    rates = [layer.p for layer in model.modules() if isinstance(layer, Dropout)]
    objectives = [other.objective for other in ([task] if task.name else plan.tasks.values())]
    if all(limit(rate) == limit(0.0) for rate in rates):  # a rate below 2**-32 drops nothing, too
        problems += [
            f"encoder: it drops nothing, so the two views of objective {objective.kind} would be equal; set "
            "encoder.dropout=0.1"
            for objective in objectives
            if objective.needs_dropout
        ]
    positions = max_span_tokens(model)
    texts = task.objective.text_tokens
    setting, tokens = ("spans", task.spans.max_tokens) if texts is None else ("objective", texts)
    if tokens > positions:
        problems.append(
            f"{setting}.max_tokens = {tokens}: the encoder has positions for {positions} tokens, specials included; "
            f"use shorter {'spans (and prepare again)' if texts is None else 'texts'} or an encoder with more positions"
        )
    num_specials = vocabulary_of(tokenizer, encoder.prompt or "", encoder.query_prompt).num_specials
    longest = max(("prompt", "query_prompt"), key=lambda name: len(getattr(encoder, name) or ""))
    if (room := positions - num_specials) < 1:
        problems.append(
            f"encoder.{longest} leaves {max(0, room)} of the encoder's {positions} positions for a span; use a shorter "
            "one"
        )
    elif texts is not None and texts <= num_specials:
        problems.append(
            f"objective.max_tokens = {texts}: special tokens and encoder.{longest} take {num_specials}, and a text "
            f"needs at least one; set it to at least {num_specials + 1}, or use a shorter prompt"
        )
    return problems or _weight_problems(plan, task, tokenizer)  # weights take seconds


def _prompt_problems(encoder: EncoderConfig) -> Iterator[str]:
    """The problem of prompts that the encoder declares and no setting chooses."""
    try:
        prompts = read_prompts(encoder.pretrained)
    except DamagedError as error:
        yield str(error)
        return
    if prompts and encoder.prompt is None:
        declared = ", ".join(f"{name} = {text!r}" for name, text in prompts.items())
        yield (
            f"encoder.pretrained = {encoder.pretrained}: declares prompts ({declared}), which its texts need; set "
            'encoder.prompt to one of them, or to "" for none'
        )


def _weight_problems(plan: RunPlan, task: TaskSettings, tokenizer: Any) -> list[str]:
    """Problems of an encoder with its weights, which take seconds to load; logs oddities that are no problem."""
    config, manifest = plan.config, plan.manifests[task.name]
    encoder, objective_settings = config.encoder, task.objective
    try:
        built = build_encoder(config, tokenizer)
    except _UNLOADABLE as error:
        return [_unloadable(encoder, error)]
    try:
        objective = build_objective(task, built, manifest.short_documents)
    except UsageError as error:  # unless the objective's own checks report the same
        return [] if objective_settings.problems(task.context(manifest.short_documents), manifest) else [str(error)]
    if wrong := _size_problems(plan, task, built, objective):
        return wrong
    if encoder.projection.kind != "none" and objective.exported():
        return [
            f"encoder.projection.kind = {encoder.projection.kind}: the layers that objective {objective_settings.kind} "
            "exports would follow a projection that is not exported; set it to none"
        ]
    probed = built
    if objective_settings.sets_rates:  # in each batch; here they may be 0, at which nothing shows
        dropping = encoder.model_copy(update={"dropout": _PROBED_RATE, "attention_dropout": _PROBED_RATE})
        probed = build_encoder(config.model_copy(update={"encoder": dropping}), tokenizer)
    if not drops_by_key(probed):
        kind, family = objective_settings.kind, built.model.config.model_type
        advice = f"use another encoder, for example of type {', '.join(FAMILIES[:5])}"
        if objective_settings.sets_rates:
            return [
                f"encoder: model type {family} drops some values at a rate of the whole model, and objective {kind} "
                f"has rates for each view; {advice}"
            ]
        if objective_settings.needs_dropout:
            return [
                f"encoder: model type {family} drops some values by torch's generator, so the views of objective "
                f"{kind} would change with the microbatch; set encoder.attention_dropout=0, or {advice}"
            ]
        get_logger().warning(
            "encoder: model type %s drops some values by torch's generator, so gradients change with "
            "microbatch_tokens and scaling.num_workers; encoder.dropout=0 encoder.attention_dropout=0 avoids this",
            family,
        )
    if remark := built.load_report.remark(encoder.pretrained):
        get_logger().warning("%s", remark)
    if remark := left_out(encoder.pretrained, encoder.pooling):
        get_logger().warning("%s", remark)
    if built.config.layout != encoder.layout:
        get_logger().warning(
            "encoder: model type %s mixes the spans of a packed batch; padding them instead (encoder.layout = %s), "
            "which is exact but slower",
            built.model.config.model_type,
            built.config.layout,
        )
    return built.load_report.problems(encoder.pretrained, objective_settings.mlm and not encoder.new_mlm_head)


def _size_problems(
    plan: RunPlan, task: TaskSettings, encoder: Encoder, objective: Objective[Any] | None = None
) -> list[str]:
    """Problems of the sizes of the embedding, with the objective if it may export layers."""
    matryoshka, projection = task.objective.matryoshka, plan.config.encoder.projection.kind
    if matryoshka is None:
        return []
    if projection != "none":
        return [
            f"objective.matryoshka cuts the exported embedding, and encoder.projection.kind = "
            f"{projection} follows it in the loss; set it to none"
        ]
    if objective is not None and objective.exported() and not objective.cuts_exported:
        return [
            f"objective.matryoshka: objective {task.objective.kind} exports layers and does not cut their output "
            "(cuts_exported); remove matryoshka"
        ]
    problem = matryoshka.problem(encoder.output_size if objective is None else objective.exported_size)
    return [problem] if problem else []


def _unloadable(encoder: EncoderConfig, error: Exception) -> str:
    source = encoder.pretrained if encoder.pretrained is not None else encoder.from_config
    return f"encoder = {source}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    # messages of transformers have many lines, some errors none
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def task_problems(plan: RunPlan) -> list[str]:
    """Problems of the objectives and encoders of the auxiliary tasks, one line each, which starts with the key."""
    problems = []
    for name in plan.config.auxiliary_tasks:
        task, manifest = plan.tasks[name], plan.manifests[name]
        wrong = objective_problems(task)
        if not wrong and manifest.content.kind in MEDIA_KINDS:
            try:
                encoder = build_encoder(plan.config, tokenizer_of_shards(plan.data[""][0], plan.manifest)[0])
            except _UNLOADABLE as error:
                problems.append(_unloadable(plan.config.encoder, error))  # equal lines are shown once
                continue
            try:
                frontend = build_frontend(task, encoder, manifest.content)
                problem = patch_problem(encoder, frontend) if frontend is not None else None
                wrong = [f"frontend: {problem}"] if problem else _size_problems(plan, task, encoder)
            except EncoderError as error:  # it names the setting
                wrong = [_first_line(error)]
            except _UNLOADABLE as error:
                source = plan.config.auxiliary_tasks[name].frontend.pretrained
                wrong = [f"frontend.pretrained = {source}: {_first_line(error)}"]
        elif not wrong:
            wrong = encoder_problems(plan, name)
        problems += [f"auxiliary_tasks.{name}.{line}" for line in wrong]
    return problems
