"""Configuration of the filters: the `filters` section of `prepare`. A rule set to null is off."""

from declutr.common.config import Strict
from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.pipeline.filters.boilerplate import Boilerplate
from declutr.pipeline.filters.c4 import C4Rules, c4_problems
from declutr.pipeline.filters.contamination import Contamination
from declutr.pipeline.filters.evaluation_sets import contamination_problems, hash_sets
from declutr.pipeline.filters.gopher import GopherQuality
from declutr.pipeline.filters.language import LanguageRule, language_problems
from declutr.pipeline.filters.repetition import GopherRepetition

ONLY_BOILERPLATE = "only_boilerplate"
CONTAMINATED = "contaminated"


class FiltersConfig(Strict):
    """Rules that remove text or drop documents, in the order in which they are applied.

    A section given as `{}` is on, with its published thresholds.
    """

    boilerplate: Boilerplate | None = None
    """Remove lines of navigation, cookie notices and the like."""
    c4: C4Rules | None = None
    """Lines and pages after C4."""
    gopher: GopherQuality | None = None
    """Counts of words and lines after Gopher."""
    language: LanguageRule | None = None
    """Identify each document's language; keep selected languages."""
    repetition: GopherRepetition | None = None
    """Repetition within a document after Gopher."""
    contamination: Contamination | None = None
    """Look for texts of evaluation sets."""
    normalise_whitespace: bool = True
    """Collapse whitespace to single spaces, after all rules that look at lines."""


def problems(config: FiltersConfig) -> list[str]:
    """Finds problems of the settings and of the files that they name, one line each."""
    found = c4_problems(config.c4) if config.c4 else []
    found += language_problems(config.language) if config.language else []
    found += contamination_problems(config.contamination) if config.contamination else []
    return found


def fingerprints(config: FiltersConfig) -> dict[str, str]:
    """SHA-256 of the files that influence the choice, by setting; part of the identity of a run.

    Raises:
        OSError: a file cannot be read (`problems` reports this earlier).
    """
    found = {}
    if config.c4 and config.c4.bad_words:
        found["filters.c4.bad_words"] = hash_file(expand(config.c4.bad_words))
    if config.contamination:
        found["filters.contamination.paths"] = hash_sets(config.contamination)
    return found
