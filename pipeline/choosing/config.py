"""Configuration of cleaning and choosing: the `choosing` section of `prepare`. What is null is off."""

from common.config import Strict
from common.paths import expand
from common.storage import hash_file
from pipeline.choosing.boilerplate import Boilerplate
from pipeline.choosing.c4 import C4Rules, c4_problems, c4_reasons
from pipeline.choosing.contamination import Contamination
from pipeline.choosing.evaluation_sets import contamination_problems, hash_sets
from pipeline.choosing.gopher import GopherQuality, quality_reasons
from pipeline.choosing.language import LanguageRule, language_problems, language_reasons
from pipeline.choosing.repetition import GopherRepetition, repetition_reasons

ONLY_BOILERPLATE = "only_boilerplate"
CONTAMINATED = "contaminated"


class ChoosingConfig(Strict):
    """What is removed from a document's text and which documents are dropped, in the order in which it happens.

    A section given as `{}` is on with its published thresholds.
    """

    boilerplate: Boilerplate | None = None
    """Remove lines of navigation, cookie notices and the like."""
    c4: C4Rules | None = None
    """Lines and pages after C4."""
    gopher: GopherQuality | None = None
    """Counts of words and lines after Gopher."""
    language: LanguageRule | None = None
    """Find each document's language; keep some."""
    repetition: GopherRepetition | None = None
    """Repetition within a document after Gopher."""
    contamination: Contamination | None = None
    """Look for texts of evaluation sets."""
    normalise_whitespace: bool = True
    """Collapse whitespace to single spaces, after all rules that look at lines."""


def problems(config: ChoosingConfig) -> list[str]:
    """Everything that is wrong with the settings and the files they name, one line a problem."""
    found = c4_problems(config.c4) if config.c4 else []
    found += language_problems(config.language) if config.language else []
    found += contamination_problems(config.contamination) if config.contamination else []
    return found


def reasons(config: ChoosingConfig) -> list[str]:
    """Every reason for which `Chooser.choose` may drop a document, in the order of the rules."""
    found = [ONLY_BOILERPLATE] if config.boilerplate else []
    found += c4_reasons(config.c4) if config.c4 else []
    found += quality_reasons(config.gopher) if config.gopher else []
    found += language_reasons(config.language) if config.language else []
    found += repetition_reasons(config.repetition) if config.repetition else []
    found += [CONTAMINATED] if config.contamination and config.contamination.action == "drop" else []
    return found


def fingerprints(config: ChoosingConfig) -> dict[str, str]:
    """SHA-256 of the files that decide what is chosen, by setting: with the settings they make runs comparable.

    Raises:
        OSError: a file cannot be read (`problems` says so before).
    """
    found = {}
    if config.c4 and config.c4.bad_words:
        found["choosing.c4.bad_words"] = hash_file(expand(config.c4.bad_words))
    if config.contamination:
        found["choosing.contamination.paths"] = hash_sets(config.contamination)
    return found
