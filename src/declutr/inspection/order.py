"""The order in which a run reads its rows, from its configuration and the manifests alone; nothing here needs torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from declutr.common.config import apply_overrides, first_problem, load_config
from declutr.common.errors import ConfigError, UsageError
from declutr.common.stores.address import is_remote
from declutr.common.yamlfile import read_yaml_file
from declutr.pipeline.shards.lookup import find_entries
from declutr.pipeline.shards.manifest import SPLITS
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.config import TaskSettings, TrainConfig
from declutr.trainer.data.plan import Plan
from declutr.trainer.driver.checks import data_problems, share_problems
from declutr.trainer.metrics.metrics import METRICS, find_step, read_last_step
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.run import RunPlan

_MOST_READS = 10**7  # positions of a row are listed in memory, and `steps=N` may be anything


@dataclass(frozen=True)
class TaskOrder:
    """The order of one task of a run."""

    settings: TaskSettings
    shards: ShardSet  # training split of its shards
    plan: Plan  # its rows at each step
    encoder: EncoderConfig  # settings of the run's encoder


@dataclass(frozen=True)
class RunOrder:
    """The order of all tasks of a run."""

    folder: Path  # folder of the run
    tasks: Mapping[str, TaskOrder]  # the tasks by name, "" the main one; every step has a batch of each
    last_step: int  # last step of the whole run
    taken: int  # newest step in the run's metrics; 0 before the first

    def logged_digest(self, task: str, step: int) -> int | None:
        """Digest of a task's batch in the run's metrics; None if the step is not there."""
        line = find_step(self.folder / METRICS, step) if step <= self.taken else None
        digest = None if line is None else line.get(f"{task}_batch_digest" if task else "batch_digest")
        return None if digest is None else int(digest)

    def document_lines(self, document: str) -> Iterator[str]:
        """Describe every step that reads the documents which `document` names: an id, a source or SOURCE:OFFSET."""
        matched = False
        for name, task in self.tasks.items():
            for row, line in entries(task.shards, document):
                matched = True
                yield f"{f'task {name}: ' if name else ''}{line}"
                if row is None:
                    yield "  no step reads it"
                    continue
                corpus, _ = task.plan.place_of(row)
                if (times := task.plan.rows_read(self.last_step)[corpus] // task.shards.sizes[corpus]) > _MOST_READS:
                    raise UsageError(
                        f"--document {document}: {self.last_step:,} steps read it about {times:,} times, and at most "
                        f"{_MOST_READS:,} are listed; add steps=N with fewer"
                    )
                epochs, steps, positions = task.plan.reads_of(row, self.last_step)
                for epoch, step, position in zip(epochs.tolist(), steps.tolist(), positions.tolist(), strict=True):
                    later = "" if step <= self.taken else ", not taken yet"
                    yield f"  epoch {epoch}: step {step}, position {position} of its batch{later}"
                past = int((steps <= self.taken).sum())
                if rate := getattr(task.settings.objective, "mixup", 0):
                    yield f"  not listed: steps that mix it into another clip (objective.mixup = {rate})"
                yield f"  {past:,} of the {self.taken:,} steps taken read it, {len(steps):,} of all {self.last_step:,}"
        if not matched:
            folders = ", ".join(str(folder) for task in self.tasks.values() for folder in task.shards.folders)
            raise UsageError(
                f"{folders}: no document matches {document!r}; give an id (at least 8 hexadecimal digits), a source or "
                "SOURCE:OFFSET, as --step shows them"
            )


def entries(shards: ShardSet, document: str) -> Iterator[tuple[int | None, str]]:
    """The documents that `document` names: number in these shards, or None, and place with what became of it."""
    hits = ((corpus, *hit) for corpus, folder in enumerate(shards.folders) for hit in find_entries(folder, document))
    for corpus, unit, _, entry in hits:
        place = f"document {entry.id.hex() if entry.id else '(without an id)'}, {entry.source} at {entry.offset}"
        if entry.status != "train":
            became = "held out" if entry.status in SPLITS else f"not kept: {entry.status}"
            yield None, f"{place}: {became}"
            continue
        number = shards.number_of(shards.first_of(f"train-{unit}.arrow", corpus) + (entry.row or 0))
        own = None if number is None else number - sum(shards.sizes[:corpus])
        of_all = f"of {shards.sizes[corpus]:,} in {shards.folders[corpus]}"
        yield number, f"{place}: {'outside the share' if own is None else f'row {own:,}'} {of_all}"


def read_order(path: Path, overrides: Sequence[str] = ()) -> RunOrder:
    """The order of the run in a folder, or that a YAML file configures, whose addresses are not opened."""
    config = (
        stored_config(path, overrides) if path.is_dir() else load_config(str(path), "train", TrainConfig, overrides)
    )
    if path.is_dir():
        config = config.model_copy(update={"run": str(path)})  # the folder may have moved
    # What a validation reads decides no order, and may have gone.
    unread = config.validation.model_copy(update={"data": None, "stsb": None, "sickr": None})
    config = config.model_copy(update={"validation": unread})
    places = {
        key: (place, f"add {task.prefix}data={replacement(task)}")
        for task in config.tasks().values()
        for key, place in task.keyed_places.items()
    }
    if problems := [
        f"{key} = {place} is an address, which is not opened: declutr copy {place} FOLDER, then {remedy}"
        for key, (place, remedy) in places.items()
        if is_remote(place)  # a question about a run must not fetch a corpus
    ]:
        raise UsageError("\n".join(problems))
    plan = RunPlan.of(config)
    problems = [
        f"{line}; start in the folder in which the run was started, or {places[key][1]}"
        for key, line in plan.unreadable.items()
    ]
    problems += [
        f"{task.prefix}{problem}; or add {task.prefix}data={replacement(task)}"
        for name, task in plan.tasks.items()
        for problem in (data_problems(task, plan.corpora[name]) if name in plan.corpora else ())
    ]
    problems = problems or share_problems(plan)
    if problems:
        raise UsageError("\n".join(problems))
    tasks = {
        name: TaskOrder(task, plan.training_shards[name], plan.orders[name], config.encoder)
        for name, task in plan.tasks.items()
    }
    newest = read_last_step(plan.folder / METRICS)
    return RunOrder(plan.folder, tasks, plan.total_steps, newest["step"] if newest else 0)


def replacement(task: TaskSettings) -> str:
    """A value for `data` that names as many folders, with the weights of the run."""
    if len(task.places) == 1:
        return "FOLDER"
    several = [f"{{path: FOLDER, weight: {share}}}" for share in task.plan([1] * len(task.places)).shares]
    return f"'[{', '.join(several)}]'"


def stored_config(run: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in the folder of a run, with these overrides."""
    try:
        values = read_yaml_file(run / "config.yaml")
        problems = apply_overrides(values, overrides, TrainConfig.alternatives) if isinstance(values, dict) else None
        if not problems:
            return TrainConfig.model_validate(values)
    except FileNotFoundError as error:
        raise UsageError(f"{run}: has no config.yaml; name the folder of a run, or the YAML file of one") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = first_problem(error, TrainConfig) if isinstance(error, ValueError) else error
        raise UsageError(f"{run}: its config.yaml cannot be used ({reason})") from error
    raise ConfigError(str(run), problems)
