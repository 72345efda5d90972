"""Kinds of content of the shards, and the `content` section of `prepare`.

A row of `documents` is a long text with windows for spans. A row of the other kinds is a group of short texts: a
sentence; or a premise and its labelled hypotheses.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field

from common.config import Strict

ContentKind = Literal["documents", "sentences", "pairs", "triples"]
Label = Literal["entailment", "neutral", "contradiction"]
LABELS: tuple[Label, ...] = ("entailment", "neutral", "contradiction")
"""Labels of hypotheses; a shard holds their places in this tuple."""
NO_LABEL = -1
"""Label of a text that is no hypothesis."""
ENTAILMENT, CONTRADICTION = LABELS.index("entailment"), LABELS.index("contradiction")
TRIPLE_LABELS = (NO_LABEL, ENTAILMENT, CONTRADICTION)
"""Labels of the texts of a triple."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts of one row.

    Attributes:
        starts: `(num_texts,)` int32 start of each text in the row's tokens; ascending, the first is 0.
        labels: `(num_texts,)` int8 label of each text; NO_LABEL for the first.
    """

    starts: NDArray[np.int32]
    labels: NDArray[np.int8]


class DocumentsContent(Strict):
    """Rows of the shards: long documents, each with windows for spans (geometry, short_documents)."""

    kind: Literal["documents"] = "documents"


class SentencesContent(Strict):
    """Rows of the shards: sentences, one a row."""

    kind: Literal["sentences"]
    split: bool = False
    """Split documents into sentences. false: every text of the corpus is one row."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}$")
    """Language by whose rules and abbreviations documents are split, ISO 639. A language without rules in `sentencex`
    is split by those of a related language or of English."""


class PairsContent(Strict):
    """Rows of the shards: premises with labelled hypotheses, from JSONL, CSV, TSV or Parquet.

    The pairs of a file that have the same premise make one row. They are held in memory, so a file has at most 1 GiB.
    """

    kind: Literal["pairs"]
    premise: str = "premise"
    """Key or column of the premise; `sentence1` in SNLI's and MNLI's own files."""
    hypothesis: str = "hypothesis"
    """Key or column of the hypothesis; `sentence2` in SNLI's and MNLI's own files."""
    label: str = "label"
    """Key or column of the label: entailment, neutral, contradiction, or 0, 1, 2. Pairs with "-" or -1 are dropped.
    `gold_label` in SNLI's and MNLI's own files."""
    needs: list[Label] = Field(default_factory=list)
    """Labels of which a premise must have a hypothesis each; others are dropped. [entailment, contradiction] for
    supervised SimCSE."""


class TriplesContent(Strict):
    """Rows of the shards: a sentence, an entailed and a contradicting one, from CSV, TSV, JSONL or Parquet."""

    kind: Literal["triples"]
    premise: str = "sent0"
    """Key or column of the sentence."""
    entailment: str = "sent1"
    """Key or column of the entailed sentence."""
    contradiction: str = "hard_neg"
    """Key or column of the contradicting sentence."""


def _with_kind(value: object) -> object:
    """Accepts a section that is a kind alone, such as `content: sentences`."""
    return {"kind": value} if isinstance(value, str) else value


def keys_of(content: "AnyContent") -> dict[str, str]:
    """Keys of the values that a row of the input has, by setting; none if it has one text."""
    names: dict[str, tuple[str, ...]] = {
        "pairs": ("premise", "hypothesis", "label"),
        "triples": ("premise", "entailment", "contradiction"),
    }
    return {f"content.{name}": getattr(content, name) for name in names.get(content.kind, ())}


AnyContent = Annotated[
    DocumentsContent | SentencesContent | PairsContent | TriplesContent,
    Field(discriminator="kind"),
    BeforeValidator(_with_kind),
]


def noun_of(kind: ContentKind) -> str:
    """Noun for the rows of a kind in messages: documents or rows."""
    return "documents" if kind == "documents" else "rows"
