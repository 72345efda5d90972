"""The quality rules of Gopher: Rae et al. 2021, "Scaling Language Models" (arXiv:2112.11446), appendix A.1.1.

The paper does not define words and lines. Here a word is text between whitespace, and blank lines do not count.
"""

import re

from pydantic import Field

from declutr.common.config import Strict
from declutr.pipeline.filters.words import WordHashes

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_STOP_WORD = re.compile(rf"\b(?:{'|'.join(STOP_WORDS)})\b", re.IGNORECASE)
_BULLETS = frozenset("•‣▶◀◦■□▪▫●○·*-–")
_ELLIPSES = ("...", "…")

Drop = tuple[str, str]
"""Reason, and the figure that decided."""


class GopherQuality(Strict):
    """Thresholds on words and lines. A rule set to null is off; the defaults are the paper's."""

    min_words: int | None = Field(default=50, ge=0)
    """Reason gopher_word_count."""
    max_words: int | None = Field(default=100_000, ge=1)
    """Reason gopher_word_count. Drops whole books: null for a corpus of long documents."""
    min_mean_word_characters: float | None = Field(default=3, ge=0)
    """Reason gopher_word_length."""
    max_mean_word_characters: float | None = Field(default=10, gt=0)
    """Reason gopher_word_length."""
    max_symbols_per_word: float | None = Field(default=0.1, ge=0)
    """Largest number of hash signs, or of ellipses, per word. Reason gopher_symbols."""
    max_bullet_lines: float | None = Field(default=0.9, ge=0, le=1)
    """Share of lines that start with a bullet. Reason gopher_bullets."""
    max_ellipsis_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Share of lines that end with an ellipsis. Reason gopher_ellipses."""
    min_words_with_letter: float | None = Field(default=0.8, ge=0, le=1)
    """Share of words with a letter of any script. Reason gopher_letters."""
    min_stop_words: int | None = Field(default=2, ge=0, le=len(STOP_WORDS))
    """Least number of different words of: the, be, to, of, and, that, have, with. English only; null for other
    languages. Reason gopher_stop_words."""


def quality_drop(text: str, words: WordHashes, lines: list[str], config: GopherQuality) -> Drop | None:
    """The first rule that a document breaks, or None.

    Args:
        text: the document with its lines.
        words: its words, not folded.
        lines: its lines, stripped, without blank ones.
        config: the thresholds.
    """
    num_words = max(1, len(words))
    if not _within(len(words), config.min_words, config.max_words):
        return "gopher_word_count", f"{len(words)} words"
    mean = float(words.lengths.sum()) / num_words
    if not _within(mean, config.min_mean_word_characters, config.max_mean_word_characters):
        return "gopher_word_length", f"{mean:.2f} characters a word"
    if config.max_symbols_per_word is not None:
        ratio = max(text.count("#"), sum(map(text.count, _ELLIPSES))) / num_words
        if ratio > config.max_symbols_per_word:
            return "gopher_symbols", f"{ratio:.3f} symbols a word"
    num_lines = max(1, len(lines))
    if config.max_bullet_lines is not None:
        share = sum(line[0] in _BULLETS for line in lines) / num_lines
        if share > config.max_bullet_lines:
            return "gopher_bullets", f"{share:.3f} of the lines"
    if config.max_ellipsis_lines is not None:
        share = sum(line.endswith(_ELLIPSES) for line in lines) / num_lines
        if share > config.max_ellipsis_lines:
            return "gopher_ellipses", f"{share:.3f} of the lines"
    if config.min_words_with_letter is not None:
        share = int(words.with_letter.sum()) / num_words
        if share < config.min_words_with_letter:
            return "gopher_letters", f"{share:.3f} of the words"
    if config.min_stop_words is not None and not _has_stop_words(text, config.min_stop_words):
        return "gopher_stop_words", f"fewer than {config.min_stop_words}"
    return None


def _within(value: float, low: float | None, high: float | None) -> bool:
    """Returns True if a value is within both thresholds; a threshold of None is off."""
    return (low is None or value >= low) and (high is None or value <= high)


def _has_stop_words(text: str, least: int) -> bool:
    """Returns True if at least `least` different stop words occur; English text needs about one sentence for this."""
    seen: set[str] = set()
    if least > 0:
        for match in _STOP_WORD.finditer(text):
            seen.add(match.group().lower())
            if len(seen) >= least:
                break
    return len(seen) >= least
