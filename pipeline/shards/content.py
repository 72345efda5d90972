"""Kinds of content of the shards, and the `content` section of `prepare`.

A row of `documents` is a long text with windows for spans. A row of `sentences`, `pairs` or `triples` is a group of
short texts: a sentence; or a premise and its labelled hypotheses. A row of `images` or `audio` is one image or clip.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from declutr.common.config import Strict

TextKind = Literal["documents", "sentences", "pairs", "triples"]
MediaKind = Literal["images", "audio"]
ContentKind = TextKind | MediaKind
MEDIA_KINDS: tuple[MediaKind, ...] = ("images", "audio")
"""Kinds without text: no tokenizer, no windows, no rules of `filters`."""
_NOUNS = {"documents": "documents", "images": "images", "audio": "clips"}
FOLDER = "folder"  # value of `content.label` that takes the name of the file's folder
PARENT_FOLDER = "parent_folder"  # value of `content.label` that takes the name of the folder above the file's folder
Label = Literal["entailment", "neutral", "contradiction"]
LABELS: tuple[Label, ...] = ("entailment", "neutral", "contradiction")
"""Labels of hypotheses; a shard holds their places in this tuple."""
NO_LABEL = -1  # label of a text that is no hypothesis
ENTAILMENT, CONTRADICTION = LABELS.index("entailment"), LABELS.index("contradiction")
TRIPLE_LABELS = (NO_LABEL, ENTAILMENT, CONTRADICTION)  # labels of the texts of a triple


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts of one row."""

    starts: NDArray[np.int32]  # `(num_texts,)` start of each text in the row's tokens; ascending, the first is 0
    labels: NDArray[np.int8]  # `(num_texts,)` label of each text; NO_LABEL for the first


class DocumentsContent(Strict):
    """Long documents, each with windows for spans (geometry, short_documents)."""

    kind: Literal["documents"] = "documents"


class SentencesContent(Strict):
    """Sentences, one a row."""

    kind: Literal["sentences"]
    split: bool = False
    """Split documents into sentences; false: a text is a row."""
    language: str = Field(default="en", pattern="^[a-z]{2,3}$")
    """ISO 639 code for splitting; without own rules a related language or English."""


class PairsContent(Strict):
    """Premises with labelled hypotheses, or queries with texts.

    The pairs of a file that have the same premise make one row. They are held in memory, so a file has at most 1 GiB.
    """

    kind: Literal["pairs"]
    premise: str = "premise"
    """Key or column of the premise."""
    hypothesis: str = "hypothesis"
    """Key or column of the hypothesis."""
    label: str | None = "label"
    """Key or column of the label: entailment, neutral, contradiction, or 0, 1, 2; "-" and -1 drop the pair. null: each
    pair is an entailment."""
    required_labels: list[Label] = Field(default_factory=list)
    """Drop premises without a hypothesis of each: [entailment, contradiction] for supervised SimCSE."""

    @model_validator(mode="after")
    def _labelled(self) -> "PairsContent":
        if self.label is None and self.required_labels:
            raise ValueError("required_labels has no effect with label = null; remove one of them")
        return self


class TriplesContent(Strict):
    """A sentence, an entailed and a contradicting one a row."""

    kind: Literal["triples"]
    premise: str = "sent0"
    """Key or column of the sentence."""
    entailment: str = "sent1"
    """Key or column of the entailed sentence."""
    contradiction: str = "hard_neg"
    """Key or column of the contradicting sentence."""


def _checked_label_rule(value: str | None) -> str | None:
    """Checks that a label rule is `folder`, `parent_folder`, null or a regular expression with one group."""
    if value in (None, FOLDER, PARENT_FOLDER):
        return value
    try:
        groups = re.compile(value or "").groups
    except (re.error, RecursionError, OverflowError) as error:  # deep nesting; a count of repeats beyond 32 bits
        raise ValueError(
            f"{value!r} is not a regular expression: {error}; give folder, parent_folder, an expression or null"
        ) from error
    if groups != 1:
        raise ValueError(f"{value!r} has {groups} groups; put the label, and nothing else, in one pair of parentheses")
    return value


LabelRule = Annotated[str | None, AfterValidator(_checked_label_rule)]


class _LabelledContent(Strict):
    label: LabelRule = FOLDER
    r"""Label of a file. folder: its folder's name. parent_folder: that of the folder above. An expression with one
    group, such as `^(\d)_`, is searched in the path. null: none. A `.cls` member or `label_column` comes first. Files
    without a label fail."""
    label_column: str = "label"
    """Parquet column of the labels."""
    max_labels: int | None = Field(default=None, ge=1)
    """Keep this many labels, those with most rows; null: all."""


class ImagesContent(_LabelledContent):
    """Images from files, tar archives or Parquet.

    JPEG, PNG, WebP, GIF, BMP, TIFF and PPM are read. The first frame of an animation is taken. Transparent parts become
    white.
    """

    kind: Literal["images"]
    shortest_edge: int = Field(default=256, ge=8, le=2048)
    """Limit of the shorter side, pixels; larger images are shrunk."""
    image: str = "image"
    """Parquet column of the images."""


class AudioContent(_LabelledContent):
    """Clips from files, tar archives or Parquet, as log-mel frames.

    WAV, FLAC and Ogg (Vorbis, Opus) are read. Channels are averaged, and the clip is resampled to `sample_rate`.
    """

    kind: Literal["audio"]
    sample_rate: int = Field(default=16_000, ge=1000, le=192_000)
    """Samples per second of the resampled clips."""
    num_mel_bins: int = Field(default=128, ge=1, le=512)
    """Mel bands of a frame."""
    frame_ms: float = Field(default=25.0, ge=1, le=1000)
    """Length of a frame, milliseconds."""
    hop_length_ms: float = Field(default=10.0, ge=1, le=1000)
    """Distance between two frames' starts, milliseconds."""
    max_seconds: float = Field(default=10.24, gt=0, le=600)
    """Longest clip, seconds; longer ones are cut."""
    audio: str = "audio"
    """Parquet column of the clips."""


MediaContent = ImagesContent | AudioContent


def _with_kind(value: object) -> object:
    """Accepts a section that is a kind alone, such as `content: sentences`."""
    return {"kind": value} if isinstance(value, str) else value  # most contents need no other setting


def noun_of(kind: ContentKind) -> str:
    """Noun for rows of this kind in messages."""
    return _NOUNS.get(kind, "rows")


def size_noun(kind: ContentKind) -> str:
    """Noun for the unit of `num_tokens` in messages."""
    return {"images": "pixels", "audio": "frames"}.get(kind, "tokens")


def keys_of(content: "AnyContent") -> dict[str, str]:
    """Keys of the values that a row of the input has, by setting; none if it has one text."""
    names: dict[str, tuple[str, ...]] = {
        "pairs": ("premise", "hypothesis", "label"),
        "triples": ("premise", "entailment", "contradiction"),
    }
    keys = {f"content.{name}": getattr(content, name) for name in names.get(content.kind, ())}
    return {setting: key for setting, key in keys.items() if key is not None}


AnyContent = Annotated[
    DocumentsContent | SentencesContent | PairsContent | TriplesContent | ImagesContent | AudioContent,
    Field(discriminator="kind"),
    BeforeValidator(_with_kind),
]
