"""Finds all problems of a training run that can be known before Ray starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from declutr.common.bootstrap import MIN_ROWS
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import excerpt
from declutr.common.errors import ConfigError, ShardError, UsageError, suggest
from declutr.common.hub import looks_like_a_path
from declutr.common.lock import LOCK
from declutr.common.paths import expand, folder_problem
from declutr.common.stores.address import bucket_problem, is_remote
from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.pipeline.shards.manifest import MANIFEST, Manifest, data_hash, load_manifest
from declutr.pipeline.shards.shards import check_shards
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, steps_in
from declutr.trainer.config import TaskSettings, TrainConfig
from declutr.trainer.corpora import corpora_problems
from declutr.trainer.driver.continuation import RUN_FILES, SUMMARY, device_problem, other_shards, run_problems
from declutr.trainer.metrics.config import STSB
from declutr.trainer.metrics.loggers import missing_wandb
from declutr.trainer.objectives.registry import BROKEN, KINDS
from declutr.trainer.run import DEVICE, RunPlan, data_folder

_OFTEN = 0.1  # of the batches
_NOT_A_RUN = {MANIFEST: "prepared shards", "state.json": "a checkpoint", "modules.json": "an encoder"}
_OF_A_RUN = {*RUN_FILES, DEVICE, LOCK, CHECKPOINTS} - {SUMMARY}  # also of one just begun; `demo` writes a summary, too
_OF_A_COMMAND = (".err", ".log", ".out", ".sh", ".yaml", ".yml")  # users put its settings and output into the run


def resolve(
    config: TrainConfig,  # of the run
    of_run: bool = True,  # refuse also what is wrong with the run's folder, such as another run's results in it
) -> RunPlan:
    """Plans a run and checks the plan, without torch."""
    problems = place_problems(config.model_dump())
    no_place = any(line.startswith("run = ") for line in problems)
    if no_place and of_run:  # the plan would look for a checkpoint in that folder
        raise ConfigError("train", problems)
    plan = RunPlan.of(config)
    if not no_place:
        problems += run_problems(plan)
        if problem := device_problem(config.scaling, plan.folder):
            problems.append(problem)
    problems += [
        line
        for key, line in plan.unreadable.items()
        if not any(problem.startswith(f"{key} = ") for problem in problems)  # `place_problems` has looked at folders
    ]
    problems += [
        f"{key} = {place}: {problem}"
        for name, folders in plan.data.items()
        for (key, place), folder in zip(plan.tasks[name].keyed_places.items(), folders, strict=True)
        for problem in check_shards(folder)
    ]
    if plan.scored is not None and (place := config.validation.data):
        problems += [f"validation.data = {place}: {line}" for line in check_shards(data_folder(place, config.cache))]
    if "" in plan.corpora:
        problems += _manifest_problems(plan)
        if not no_place and len(plan.corpora) == len(plan.tasks):  # else the joint hash lacks a task
            problems += other_shards(plan)
    if not problems:
        problems += share_problems(plan)  # opens the shards
    # gradients are compared without the run's folder, which may hold another run
    refuse([line for line in problems if of_run or not line.startswith("run = ")])
    return plan


def _manifest_problems(plan: RunPlan) -> list[str]:
    """Problems of settings that do not fit the shards."""
    main, problems = plan.manifest, []
    if main.content.kind in MEDIA_KINDS:
        return [
            f"data = {plan.config.places[0]}: holds {main.content.kind}; the main task reads texts, whose encoder is "
            "exported: name it in an auxiliary task (auxiliary_tasks.NAME.data)"
        ]
    for name, corpora in plan.corpora.items():
        task = plan.tasks[name]
        problems += corpora_problems(task.keyed_places, corpora)
        problems += [f"{task.prefix}{line}" for line in data_problems(task, corpora)]
        problems += [f"{task.prefix}{line}" for line in _misfits(plan, name)] if name else []
    if kind_problem(plan.tasks[""], main) is None:
        problems += validation_problems(plan)
    return problems


def share_problems(plan: RunPlan) -> list[str]:
    """The problems of a share of the training rows that fills no batch: its order has no end."""
    config = plan.config
    if plan.tasks[""].part is None:
        return []
    return [
        f"data_fraction = {config.data_fraction}: leaves {size} training {plan.manifest.noun} of {place}, fewer "
        f"than the {need} that batch_documents = {config.batch_documents} may need; increase it"
        for place, size, need in zip(
            config.places, plan.training_shards[""].sizes, plan.orders[""].most_in_batch(), strict=True
        )
        if size < need
    ]


def load_problems(plan: RunPlan) -> list[str]:
    """Problems that show when objective and encoder are loaded, with transformers."""
    config, main = plan.config, plan.tasks[""]
    # A run with a checkpoint has passed the other checks. Loading transformers would take seconds of each resume, and
    # the workers name what has changed since.
    if steps_in(plan.folder / CHECKPOINTS):
        return []
    if remark := config.objective.remark_before(main.context(plan.manifest.short_documents)):
        get_logger().warning("%s", remark)
    from declutr.trainer.driver.encoder_checks import encoder_problems, task_problems  # loads torch

    # The two parts may load the same objective.
    return list(dict.fromkeys([*objective_problems(main), *task_problems(plan), *encoder_problems(plan)]))


def _misfits(plan: RunPlan, name: str) -> list[str]:
    """Problems of a task whose texts do not fit its settings or the main task."""
    task, own = plan.tasks[name], plan.manifests[name]
    if own.content.kind in MEDIA_KINDS:
        return []
    problems = []
    if task.frontend is not None and task.frontend.model_fields_set:
        problems.append(f"frontend: the shards hold {own.content.kind}, which have no patches; remove it")
    return problems + _tokenizer_problems(f"data = {task.places[0]}", own, plan)


def _tokenizer_problems(label: str, manifest: Manifest, plan: RunPlan) -> list[str]:
    """The problem of shards whose tokenizer is not that of the main task."""
    main, other = plan.manifest.tokenizer, manifest.tokenizer
    if (main and main.fingerprint) == (other and other.fingerprint):
        return []
    place = plan.config.places[0]
    return [f"{label}: was prepared with another tokenizer than data = {place}; prepare it with that one"]


def refuse(problems: list[str]) -> None:
    """Raises an error that lists the problems, if any."""
    if problems:
        raise ConfigError("train", problems)


# Places that a configuration names.


def place_problems(values: Mapping[str, Any]) -> list[str]:
    """Problems of `run`, `data` and `objective.kind` of all tasks, and `encoder.pretrained`, one line each.

    A line starts with the key. The other settings may be invalid.
    """
    auxiliary = _section(values.get("auxiliary_tasks")).items()
    tasks = {"": values, **{f"auxiliary_tasks.{name}.": task for name, task in auxiliary if isinstance(task, Mapping)}}
    corpora = {prefix: _paths(f"{prefix}data", task.get("data")) for prefix, task in tasks.items()}
    checks = (
        ("run", values.get("run"), run_problem),
        *((key, value, _data_problem) for paths in corpora.values() for key, value in paths.items()),
        ("encoder.pretrained", _section(values.get("encoder")).get("pretrained"), _model_problem),
    )
    problems = []
    for key, value, problem_of in checks:
        if isinstance(value, str):
            try:  # addresses are fetched while Ray starts
                problem = (bucket_problem if is_remote(value) else problem_of)(value)
            except UsageError as error:
                problem = str(error)
            problems += [f"{key} = {value}: {problem}"] if problem else []
    mode = _section(_section(values.get("metrics")).get("wandb")).get("mode")
    if mode in ("offline", "online") and (missing := missing_wandb(mode)):
        problems.append(missing)
    for prefix, task in tasks.items():
        kind = _section(task.get("objective")).get("kind")
        # One that looks mistyped is reported elsewhere.
        if isinstance(kind, str) and not (kind in KINDS or kind in BROKEN or suggest(kind, list(KINDS))):
            problems.append(
                f"{prefix}objective {kind}: no package installed here defines it; install its package, on all hosts of "
                "the run"
            )
    return problems


def _section(value: Any) -> Mapping[str, Any]:
    """A section of the settings; empty if it is none, which the validation of the setting reports."""
    return value if isinstance(value, Mapping) else {}


def _paths(setting: str, data: Any) -> dict[str, Any]:
    """The places of a setting `data`, which may be invalid, by their keys."""
    if not isinstance(data, list):
        return {setting: data}
    paths = [corpus if isinstance(corpus, str) else _section(corpus).get("path") for corpus in data]
    return {f"{setting}.{number}.path": path for number, path in enumerate(paths)}


def run_problem(name: str) -> str | None:
    """The reason why a folder cannot be, or become, that of a run; None if it can."""
    folder = expand(name)
    for file, what in _NOT_A_RUN.items():
        if (folder / file).is_file():
            return f"holds {what}; name another folder"
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    foreign = sorted(
        name for name in names if not name.startswith((".", "lost+found")) and not name.endswith(_OF_A_COMMAND)
    )
    if foreign and not names & _OF_A_RUN:
        return f"holds {excerpt(foreign)}, not a run; name a new folder"
    return folder_problem(folder)


def _data_problem(name: str) -> str | None:
    folder = expand(name)
    if folder.exists() and not folder.is_dir():
        return "is a file; name the folder of the shards, the `output` of `prepare`"
    try:
        load_manifest(folder)
    except (ShardError, OSError) as error:
        return str(error)
    return None


def _model_problem(name: str) -> str | None:
    folder = expand(name)
    if not folder.is_dir():
        return f"no such folder; looked at {folder.absolute()}" if looks_like_a_path(name) else None
    is_encoder = (folder / "config.json").is_file()
    return None if is_encoder else "is no encoder: it has no config.json; name the folder of one (`export` of a run)"


# Settings of objective and held-out scores against the shards.


def validation_problems(plan: RunPlan) -> list[str]:
    """Reasons why the configured scores cannot be computed, one line each."""
    config, manifest, scored = plan.config, plan.manifest, plan.scored
    validation = config.validation
    if not validation.every_steps or (validation.data is not None and scored is None):
        return []
    if scored is None:
        rows, where = manifest.totals["kept_held_out"], f"held-out {manifest.noun}"
        few = "prepare with a larger validation_fraction, or set validation.stsb, or every_steps to 0"
    else:
        rows, where = scored.totals["kept_train"], f"training rows in {validation.data}"
        few = "prepare it with validation_fraction=0"
    problems = []
    if rows < 2 and not (scored is None and validation.score in validation.pairs):  # they alone are scored
        problems.append(
            f"validation.every_steps = {validation.every_steps}: the shards hold {rows} {where}, at least 2 are "
            f"needed; {few}"
        )
    if scored is not None:
        problems += _other_data_problems(plan, scored)
    kind, score = (scored or manifest).content.kind, validation.score
    if config.chooses and score in config.objective.scores and score not in config.objective.scores_of(kind):
        problems.append(
            f"validation.score = {score}: {kind} do not have this score; set validation.stsb (score = {STSB}), "
            "validation.data to shards of pairs or triples, or export=last"
        )
    return problems


def _other_data_problems(plan: RunPlan, scored: Manifest) -> list[str]:
    """Problems of `validation.data`."""
    config, main = plan.config, plan.corpora[""][0]
    label, problems = f"validation.data = {config.validation.data}", []
    reads, kind = config.objective.reads, scored.content.kind
    if ("documents" in reads) != (kind == "documents"):  # a schema that the objective's validator cannot read
        problems.append(
            f"{label}: holds {kind}, which objective {config.objective.kind} cannot score; name shards of "
            f"{' or '.join(reads)}, or remove the setting"
        )
    elif kind == "documents" and main.short_documents != scored.short_documents:
        problems.append(
            f"{label}: was prepared with short_documents = {scored.short_documents}, data = {config.places[0]} with "
            f"{main.short_documents}; prepare both alike"
        )
    elif kind == "documents":  # a validation draws one anchor of each document, and of several in any batch
        context = plan.tasks[""].context(scored.short_documents)
        context = replace(context, spans=context.spans.model_copy(update={"num_anchors": 1}), batch_documents=2)
        problems += [f"{label}: {line}" for line in config.objective.problems(context, scored)]
    if any(data_hash(scored) == data_hash(manifest) for corpora in plan.corpora.values() for manifest in corpora):
        problems.append(f"{label}: these are the rows that the run trains on; name other shards, or remove the setting")
    return problems + _tokenizer_problems(label, scored, plan)


def objective_problems(task: TaskSettings) -> list[str]:
    """Problems of the objective's package, which is loaded, with torch."""
    from declutr.trainer.objectives.base import implementation_of

    objective = task.objective
    try:
        implementation_of(objective)
    except UsageError as error:
        return [str(error)]
    if objective.mlm and "mlm" not in objective.metrics:
        return [
            f"objective.kind = {objective.kind}: mlm is true, but metrics = {list(objective.metrics)} lacks 'mlm', so "
            "the MLM loss would not be recorded; add it"
        ]
    return []


def kind_problem(task: TaskSettings, manifest: Manifest) -> str | None:
    """The problem of shards whose rows the objective cannot read."""
    objective, kind = task.objective, manifest.content.kind
    if kind in objective.reads:
        return None
    *rest, last = objective.reads
    kinds = f"{', '.join(rest)} or {last}" if rest else last
    reader = next(name for name, other in KINDS.items() if kind in other.reads)
    return (
        f"objective.kind = {objective.kind} reads {kinds}; data = {task.places[0]} holds {kind}: prepare it with "
        f"content.kind={objective.reads[0]}, or set {task.prefix}objective.kind={reader}"
    )


def data_problems(
    task: TaskSettings,  # the task
    corpora: Sequence[Manifest],  # manifests of its shards
) -> list[str]:
    """Reasons why a task's objective cannot train on these shards, one line each, from their manifests alone."""
    if other_kind := kind_problem(task, corpora[0]):
        return [other_kind]
    # `corpora_problems` names the others
    alike = [corpus for corpus in corpora if corpus.content.kind == corpora[0].content.kind]
    problems = [
        line for corpus in alike for line in task.objective.problems(task.context(corpus.short_documents), corpus)
    ]
    sizes = [corpus.totals["kept_train"] for corpus in corpora]
    for place, manifest, size, need in zip(task.places, corpora, sizes, task.plan(sizes).most_in_batch(), strict=True):
        if need > size:
            where = "the shards hold" if len(corpora) == 1 else f"a batch may need {need} rows of {place}, which holds"
            problems.append(
                f"batch_documents = {task.batch_documents}: {where} only {size} training {manifest.noun}, and a "
                "batch must not contrast one of them with itself"
            )
    return list(dict.fromkeys(problems))


# Warnings about a run that can start and may disappoint.


def validation_remarks(plan: RunPlan) -> list[str]:
    """A warning about validations of too few rows to tell an effect from chance; the run has no problems."""
    validation = plan.config.validation
    if not validation.every_steps or validation.score in validation.pairs:
        return []
    available = validated_rows(plan)
    remedy = "prepare with a larger validation_fraction, or more documents"
    if available == validation.max_documents:
        remedy = "increase validation.max_documents"
    elif validation.data is not None:
        remedy = "prepare more rows in validation.data"
    if available >= 2 * MIN_ROWS:
        return []
    return [
        f"{available} held-out {plan.manifest.noun} are validated, and half of them report the result: an interval "
        f"needs {2 * MIN_ROWS}; {remedy}"
    ]


def validated_rows(plan: RunPlan) -> int:
    """Number of rows of each validation."""
    scored = plan.scored
    available = plan.manifest.totals["kept_held_out"] if scored is None else scored.totals["kept_train"]
    return min(available, plan.config.validation.max_documents)


def corpora_remarks(plan: RunPlan, total_steps: int) -> Iterator[str]:
    """Warnings about corpora that are small for their rows in a batch, or that hold out other texts than the first."""
    config, order = plan.config, plan.orders[""]
    read, sizes = order.rows_read(total_steps), plan.training_shards[""].sizes
    for place, share, size, rows in zip(config.places, order.shares, sizes, read, strict=True):
        of_batch = config.batch_documents * share / sum(order.shares)
        if config.objective.embeds and rows > size and of_batch > _OFTEN * size:
            yield (
                f"data = {place}: it has {size:,} training {plan.manifest.noun}, of which a batch reads "
                f"{of_batch:.3g}: {of_batch / size:.0%} of the batches reach into its next pass and may hold a row "
                "twice, as its own negative; add documents, or lower batch_documents or its weight"
            )
    if len(config.places) == 1 or plan.scored is not None or not config.validation.every_steps:
        return
    names = ("validation_fraction", "seed")
    chosen = [[load_manifest(folder).config.get(name) for name in names] for folder in plan.data[""]]
    for place, values in zip(config.places, chosen, strict=True):
        for name, value, first in zip(names, values, chosen[0], strict=True):
            if value != first:
                yield (
                    f"data = {place}: was prepared with {name} = {value}, {config.places[0]} with {first}: a text in "
                    "both may be held out in one and trained on in the other; prepare both alike"
                )
