"""Settings of an objective, and facts about it that the trainer needs before torch is loaded."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import model_validator

from declutr.common.config import Strict
from declutr.pipeline.shards.content import ContentKind
from declutr.pipeline.shards.manifest import Manifest
from declutr.pipeline.shards.windows import ShortDocuments
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.objectives.matryoshka import MatryoshkaConfig
from declutr.trainer.objectives.span_config import SpanConfig

NN_ACCURACY = "nn_accuracy"
"""Score of images and sounds, after the name of their task: share of held-out rows whose nearest neighbour is right."""


@dataclass(frozen=True)
class RunContext:
    """The part of a run that an objective may depend on.

    Attributes:
        seed: seed of the run.
        spans: the `spans` section, completed from the shards.
        batch_documents: rows of the shards in one global batch.
        short_documents: treatment of short documents when the shards were prepared.
        frontend: settings of the patches, of a task with images or sounds.
    """

    seed: int = 0
    spans: SpanConfig = field(default_factory=SpanConfig)
    batch_documents: int = 16
    short_documents: ShortDocuments = "drop"
    frontend: FrontendConfig | None = None


class ObjectiveConfig(Strict):
    """Base of the settings of every objective; docs/guides/new-objective.md shows a complete one.

    A subclass defines `kind: Literal["name"] = "name"`, the class variables, and its own settings.
    """

    kind: str
    """Name of the objective."""
    matryoshka: MatryoshkaConfig | None = None
    """Sizes of the embedding trained together, each with the whole loss but MLM; null: the whole alone."""

    implementation: ClassVar[str]
    """`package.module:Class` of its `Objective`, imported when the run is built."""
    metrics: ClassVar[tuple[str, ...]]
    """Names of the loss terms in `metrics.jsonl`; the trainer computes `mlm`, masked language modelling."""
    reads: ClassVar[tuple[ContentKind, ...]] = ("documents",)
    """Kinds of content of the shards that it can read."""
    scores: ClassVar[tuple[str, ...]] = ()
    """Names of the held-out scores that its validator computes; `validation.score` is one of them, by default the
    first."""
    method: ClassVar[str]
    """Name of the method, for the model card."""
    without_mlm: ClassVar[str] = "another objective"
    """The setting that turns MLM off, for messages about encoders without an MLM head."""
    scored: ClassVar[str] = (
        "Same-document span retrieval, alignment, uniformity (log form) and effective rank on held-out documents of "
        "the corpus."
    )
    """Description of its held-out scores, for the model card."""

    @model_validator(mode="after")
    def _sizes_have_a_loss(self) -> "ObjectiveConfig":
        if self.matryoshka is not None and not self.embeds:
            raise ValueError("matryoshka needs a loss of embeddings, and only MLM is trained; remove matryoshka")
        return self

    def scores_of(self, content: ContentKind) -> tuple[str, ...]:
        """The held-out scores for shards of this kind; empty if its validator cannot read them."""
        return self.scores if content in self.reads else ()

    @property
    def embeds(self) -> bool:
        """True if the loss uses embeddings. If not, the projection gets no gradient and microbatches need one pass."""
        return True

    @property
    def mlm(self) -> bool:
        """True if the encoder's MLM head predicts selected tokens."""
        return False

    @property
    def text_tokens(self) -> int | None:
        """`max_tokens` of an objective over texts, specials included; None if `spans.max_tokens` is the limit."""
        return None

    @property
    def learns(self) -> str:
        """Supervision by the data, for the model card."""
        return "without labels"

    @property
    def dropped(self) -> tuple[str, ...]:
        """Parts that are trained and not exported, for the model card."""
        return ()

    @property
    def needs_dropout(self) -> bool:
        """True if views of a row differ by dropout alone, so that an encoder without dropout teaches nothing."""
        return False

    @property
    def sets_rates(self) -> bool:
        """True if its spans have dropout rates, which replace those of the encoder."""
        return False

    @property
    def against_collapse(self) -> str:
        """The objective's own remedy when all embeddings become alike, a sentence without its end; empty: none."""
        return ""

    @property
    def forms_classes(self) -> bool:
        """True if embeddings of a class are to become one, so that few dimensions are no collapse."""
        return False

    @property
    def mlm_weight(self) -> float:
        """Weight of the MLM loss, the mean cross entropy of the selected tokens."""
        return 1.0

    def problems(self, run: RunContext, manifest: Manifest) -> list[str]:
        """Reasons why these settings cannot train on these shards, one line each; checked before Ray starts."""
        del run, manifest
        return []

    def reads_tokens(self, run: RunContext, rows: pa.Table, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of n shard rows that a run reads in the epochs `(n,)`, for the plan of a run; by default all.

        Returns:
            `(m, 3)`: the number of a row, and the start and end of tokens of it that are read.
        """
        del run, epochs
        ends = rows.column("num_tokens").to_numpy()
        return np.column_stack([np.arange(len(ends)), np.zeros_like(ends), ends])

    def remark_before(self, run: RunContext) -> str | None:
        """A warning about a run that can start but will teach little, or None."""
        del run
        return None

    def remark_after_first_step(self, run: RunContext, terms: dict[str, float]) -> str | None:
        """A warning about the loss terms of the first step, or None."""
        del run, terms
        return None
