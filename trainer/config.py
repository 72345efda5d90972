"""The configuration of a training run, composed of sections that are defined next to the code they configure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from declutr.common import seeding
from declutr.common.config import AnyPrecision, Strict
from declutr.common.errors import suggest
from declutr.common.storage import hash_json
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.checkpoints.state import CheckpointConfig
from declutr.trainer.corpora import Corpus, Data, places_of, shares_of
from declutr.trainer.data.plan import Plan
from declutr.trainer.metrics.config import MetricsConfig, ValidationConfig
from declutr.trainer.model.config import EncoderConfig, FrontendConfig
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.registry import DEFAULT, AnyObjectiveConfig
from declutr.trainer.scaling import ScalingConfig
from declutr.trainer.step.config import OptimConfig

_LATER = (
    ("encoder", "prompt", None), ("encoder", "query_prompt", None), ("spans", "query_share", 0.0),
    ("objective", "hard_negatives", True),
)  # fmt: skip
"""Settings that runs of earlier versions lack, with the value that changes nothing, so that such a run continues."""
_UNITS = 16  # canonical microbatches of a batch: enough for several workers, few enough to be efficient


class AuxiliaryTaskConfig(Strict):
    """A task that trains the same encoder on other data, in every step of the run."""

    data: Data
    """Its prepared shards, as `data` of the run."""
    objective: AnyObjectiveConfig = DEFAULT
    spans: SpanConfig = SpanConfig()
    batch_documents: int = Field(default=16, ge=1)
    """Its rows in one step over all workers."""
    weight: float = Field(default=1.0, ge=0)
    """Factor of its loss; of little effect with `task_schedule: alternating`."""
    optim: OptimConfig | None = None
    """Its own optimizer, with `task_schedule: alternating`; null: as the run's."""
    frontend: FrontendConfig = FrontendConfig()


@dataclass(frozen=True)
class TaskSettings:
    """A task of a run; the main task has the name ""."""

    name: str  # of the task
    data: str | list[Corpus]  # its corpora, as the setting `data`
    # share of its documents that the run reads, and the seed that chooses them; None for all.
    part: tuple[float, int] | None
    objective: AnyObjectiveConfig  # what it trains
    spans: SpanConfig  # lengths and numbers of its spans
    optim: OptimConfig  # of its own updates, if it has any
    batch_documents: int  # its rows in a step over all workers
    canonical_documents: int | None  # documents of a canonical microbatch; None without `scaling.elastic_determinism`
    seed: int  # of its weights, order, spans and masks; tasks with the same data differ
    weight: float = 1.0  # factor of its loss
    frontend: FrontendConfig | None = None  # of images and sounds; None for the main task

    @property
    def prefix(self) -> str:
        """Beginning of the keys of its settings."""
        return f"auxiliary_tasks.{self.name}." if self.name else ""

    @property
    def places(self) -> tuple[str, ...]:
        """Folders or addresses of its corpora."""
        return places_of(self.data)

    @property
    def keyed_places(self) -> dict[str, str]:
        """The same by the settings that name them."""
        if isinstance(self.data, str):
            return {f"{self.prefix}data": self.data}
        return {f"{self.prefix}data.{number}.path": place for number, place in enumerate(self.places)}

    @property
    def num_canonical(self) -> int:
        """Canonical microbatches of a batch; 0 without `scaling.elastic_determinism`."""
        return 0 if self.canonical_documents is None else -(-self.batch_documents // self.canonical_documents)

    def context(
        self,
        short_documents: ShortDocuments,  # treatment of short documents, from the shards' manifest
    ) -> RunContext:
        """The part of the run that its objective may depend on."""
        return RunContext(self.seed, self.spans, self.batch_documents, short_documents, self.frontend)

    def plan(self, sizes: Sequence[int]) -> Plan:
        """The order of its rows; `sizes` has the training documents of each corpus."""
        several = () if len(sizes) == 1 else tuple(sizes)
        settings = (self.batch_documents, self.canonical_documents, several, shares_of(self.data))
        return Plan(self.seed, sum(sizes), *settings)


class TrainConfig(Strict):
    """One training run."""

    alternatives: ClassVar = ("steps", "epochs")

    run: str
    """Folder of the run, or an address (s3://bucket/runs/mine). Repeat the command to resume."""
    data: Data
    """Folder of prepared shards, or its address (`declutr copy`). Several corpora: `[{path: FOLDER, weight: 2}, {path:
    FOLDER, weight: 1}]`."""
    cache: str = "~/.cache/declutr"
    """Folder for copies of data at addresses."""
    data_fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the training documents to read, chosen by `seed`."""
    encoder: EncoderConfig
    spans: SpanConfig = SpanConfig()
    objective: AnyObjectiveConfig = DEFAULT
    optim: OptimConfig = OptimConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    scaling: ScalingConfig = ScalingConfig()
    auxiliary_tasks: dict[Annotated[str, Field(pattern="^[a-z][a-z0-9]{0,31}$")], AuxiliaryTaskConfig] = Field(
        default_factory=dict
    )
    """Other data and objectives that train the same encoder, by name (such as `image`)."""
    task_schedule: Literal["joint", "alternating"] = "joint"
    """joint: one update for all losses. alternating: an update for each task, the main one last, each with its own
    optimizer."""
    batch_documents: int = Field(default=16, ge=1)
    """Documents of a step, over all workers."""
    microbatch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Most tokens of one forward; the gradient stays the same. null: a worker's share of the batch. auto: as many as
    fit."""
    steps: int | None = Field(default=None, ge=1)
    """Optimizer steps; null: set by `epochs`."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the corpus, if `steps` is null; both null: 1."""
    precision: AnyPrecision = "auto"
    """fp32: float32. bf16: matrix products of the forward in bfloat16. auto: bf16 if every worker has units for it
    (GPU, AMX, AVX-512 BF16), else fp32."""
    seed: int = Field(default=0, ge=0)
    """Seed of new weights, order, spans, masks and dropout."""
    on_nonfinite_loss: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite. stop: end the run. skip: leave out the update."""
    max_skipped_steps: int = Field(default=10, ge=1)
    """Steps in a row that `skip` may leave out."""
    export: Literal["last", "best"] = "last"
    """Checkpoint to export. last: the last. best: the best by `validation.score`."""

    _contents: dict[str, str] = PrivateAttr(default_factory=dict)  # hash of what `validation` names, by setting

    @field_validator("validation")
    @classmethod
    def _known_score(cls, validation: ValidationConfig, info: ValidationInfo) -> ValidationConfig:
        """Refuses a score that the objective does not have. Errors of other settings do not hide this one."""
        if "objective" in info.data:  # absent if it has errors
            scores = (*validation.pairs, *info.data["objective"].scores)
            if validation.score and validation.score not in scores:
                options, hint = ", ".join(scores), suggest(validation.score, scores)
                raise ValueError(
                    f"score = {validation.score!r}: must be {f'one of {options}' if scores else 'empty'}{hint}"
                )
        return validation

    @model_validator(mode="after")
    def _complete_score(self) -> "TrainConfig":
        """Sets the objective's default score; it stays empty if there is none."""
        scores = (*self.validation.pairs, *self.objective.scores)
        if scores and not self.validation.score:
            default = scores[0]
            self.__dict__["validation"] = self.validation.model_copy(update={"score": default})  # settings are frozen
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "TrainConfig":
        problems = self._best_problems()
        if self.steps is not None and self.epochs is not None:
            problems.append(
                f"give steps = {self.steps} or epochs = {self.epochs}, not both; on a command line, one of them "
                "replaces the other of the file"
            )
        if self.optim.lr == 0:
            problems.append("optim.lr = 0: the run would learn nothing; set it above 0")
        asked = any(task.spans.query_share or task.objective.asks for task in self.tasks().values())
        if self.encoder.query_prompt is not None and not asked:
            problems.append(
                "encoder.query_prompt has no effect with spans.query_share = 0 and without pairs: nothing is a query; "
                "remove it, or set the share"
            )
        if self.task_schedule == "alternating" and not self.auxiliary_tasks:
            problems.append(
                "task_schedule = alternating has no effect without auxiliary_tasks; remove it, or add a task"
            )
        problems += [
            f"auxiliary_tasks.{name}.optim has no effect with task_schedule = joint, which has one update; remove it, "
            "or set task_schedule=alternating"
            for name, task in self.auxiliary_tasks.items()
            if task.optim is not None and self.task_schedule == "joint"
        ]
        if self.scaling.fsdp and self.microbatch_tokens == "auto":
            problems.append(
                "scaling.fsdp = True needs a fixed microbatch_tokens, not auto: a worker that runs out of "
                "memory inside a layer would leave the others waiting there; set a number of tokens, or null"
            )
        main = self.main
        if main.canonical_documents is not None:
            if self.microbatch_tokens == "auto":
                problems.append(
                    "scaling.elastic_determinism = True needs a fixed microbatch_tokens, not auto, because its "
                    "microbatches must not depend on memory; set a number of tokens, or null"
                )
            if self.scaling.most_workers > main.num_canonical:
                problems.append(
                    f"scaling.num_workers = {self.scaling.most_workers}: the {main.num_canonical} canonical "
                    f"microbatches of {main.canonical_documents} document(s) are fewer; lower num_workers or "
                    "scaling.deterministic_chunk_documents"
                )
            if self.encoder.compile:
                problems.append(
                    "scaling.elastic_determinism = True needs encoder.compile = false: compiled kernels depend on the "
                    "lengths seen before; set one of them to false"
                )
        if self.validation.pairs and not self.validation.every_steps:
            key = "stsb" if self.validation.stsb else "sickr"
            problems.append(
                f"validation.{key} needs validation.every_steps above 0; remove it, or set the number of steps"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def chooses(self) -> bool:
        """True if scores choose a checkpoint, or end the run early."""
        return self.export == "best" or self.validation.patience is not None

    @property
    def main(self) -> TaskSettings:
        """The main task."""
        return self._task(
            "", self, self.seed, part=None if self.data_fraction == 1 else (self.data_fraction, self.seed)
        )

    def tasks(self) -> dict[str, TaskSettings]:
        """The main task, named "", and the additional ones in the order of their names."""
        tasks = {"": self.main}
        for name, task in sorted(self.auxiliary_tasks.items()):  # their order in a file has no effect
            seed = seeding.torch_seed(self.seed, "branch", name)  # an old name, which decides every draw of the task
            tasks[name] = self._task(name, task, seed, part=None, weight=task.weight, frontend=task.frontend)
        return tasks

    def _task(self, name: str, section: "TrainConfig | AuxiliaryTaskConfig", seed: int, **more: Any) -> TaskSettings:
        """The task of a section of the settings; `more` has the fields that sections do not share."""
        canonical = None
        if self.scaling.elastic_determinism:
            canonical = self.scaling.deterministic_chunk_documents or -(-section.batch_documents // _UNITS)
        return TaskSettings(
            name=name,
            data=section.data,
            objective=section.objective,
            spans=section.spans,
            optim=section.optim or self.optim,
            batch_documents=section.batch_documents,
            canonical_documents=canonical,
            seed=seed,
            **more,
        )

    def _best_problems(self) -> list[str]:
        """Reasons why no best checkpoint can be chosen, which `export: best` and patience need."""
        validation, problems = self.validation, []
        patience = f"validation.patience = {validation.patience}"
        if validation.patience is not None and self.export == "last":
            problems.append(
                f"{patience} needs export = best: when patience runs out, the last weights are not the best"
            )
        needing = "export = best" if self.export == "best" else patience
        if self.chooses and not validation.score:
            problems.append(f"{needing} needs a score, and this objective has none; set validation.stsb to a folder")
        elif self.chooses and validation.every_steps == 0:
            problems.append(f"{needing} needs validation.every_steps above 0")
        return problems

    @property
    def places(self) -> tuple[str, ...]:
        """Folders or addresses of the main task's corpora."""
        return places_of(self.data)

    def total_steps(self, order: Plan) -> int:
        """Optimizer steps of the whole run; `order` is that of the main task."""
        return self.steps if self.steps is not None else order.steps_in(self.epochs or 1.0)

    @property
    def contents(self) -> dict[str, str]:
        """Hash of what `validation.data`, `stsb` and `sickr` name, by setting, once the run is resolved."""
        return {f"validation.{name}": digest for name, digest in self._contents.items()}

    def with_contents(self, contents: Mapping[str, str]) -> "TrainConfig":
        """A copy that knows the hash of what `validation.data`, `stsb` and `sickr` name, by setting."""
        config = self.model_copy()
        config._contents = dict(contents)
        return config

    def resume_settings(self) -> dict[str, object]:
        """The settings that determine the result; a run is resumed only if they are unchanged.

        What a validation reads is named by its content (`with_contents`), not by its place.
        """
        places = ("run", "data", "cache")
        written = ("checkpoint", "metrics")
        # on_nonfinite_loss has no effect before a bad loss, and after one only `skip` continues.
        free = (*places, *written, "scaling", "microbatch_tokens", "on_nonfinite_loss", "max_skipped_steps")
        patience = {"patience"}  # decides where a run ends, but not its steps
        settings = self.model_dump(mode="json", exclude={**dict.fromkeys(free, True), "validation": patience})
        for name, task in self.tasks().items():
            values: dict[str, Any] = settings["auxiliary_tasks"][name] if name else settings
            values.pop("data", None)  # where it is decides nothing, and the shards have hashes
            if len(task.places) > 1:
                values["data.weight"] = list(shares_of(task.data))
            for section, setting, neutral in _LATER:
                if (part := values.get(section, {})).get(setting) == neutral:
                    part.pop(setting, None)
            if "query_share" not in values["spans"]:
                values["spans"].pop("query_tokens")  # which has an effect with a share alone
        validation: dict[str, object] = settings["validation"]
        validation["score"] = validation["score"] or "followed"  # part of the hash of every run without a score
        validation.update(self._contents)  # a folder that moves is the same data
        return settings

    def hash(self) -> str:
        """Hash of the resume settings."""
        return hash_json(self.resume_settings())
