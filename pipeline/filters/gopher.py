"""The rules of Gopher on quality and repetition: Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1 and table A1.

The paper does not define words and lines. Here a word is text between whitespace, and blank lines do not count.
"""

import re

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import Strict
from declutr.pipeline.filters.words import U64, WordHashes, extend_ngrams

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_STOP_WORD = re.compile(rf"\b(?:{'|'.join(STOP_WORDS)})\b", re.IGNORECASE)
_BULLETS = frozenset("•‣▶◀◦■□▪▫●○·*-–")
_ELLIPSES = ("...", "…")

Drop = tuple[str, str]
"""Reason, and the figure that decided."""


class GopherQuality(Strict):
    """Thresholds on words and lines. A rule set to null is off; the defaults are the paper's."""

    min_words: int | None = Field(default=50, ge=0)
    """Least number of words."""
    max_words: int | None = Field(default=100_000, ge=1)
    """Largest number of words; drops whole books."""
    min_mean_word_characters: float | None = Field(default=3, ge=0)
    """Least mean length of words."""
    max_mean_word_characters: float | None = Field(default=10, gt=0)
    """Largest mean length of words."""
    max_symbols_per_word: float | None = Field(default=0.1, ge=0)
    """Largest number of hash signs, or of ellipses, per word."""
    max_bullet_lines: float | None = Field(default=0.9, ge=0, le=1)
    """Share of lines that start with a bullet."""
    max_ellipsis_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Share of lines that end with an ellipsis."""
    min_words_with_letter: float | None = Field(default=0.8, ge=0, le=1)
    """Share of words with a letter of any script."""
    min_stop_words: int | None = Field(default=2, ge=0, le=len(STOP_WORDS))
    """Least number of different English stop words; null for other languages."""


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
    symbols = max(text.count("#"), sum(map(text.count, _ELLIPSES)))  # the paper limits each of the two alone
    bullets, ellipses = (sum(line[0] in _BULLETS for line in lines), sum(line.endswith(_ELLIPSES) for line in lines))
    for name, limit, count, total, unit in (
        ("symbols", config.max_symbols_per_word, symbols, num_words, "symbols a word"),
        ("bullets", config.max_bullet_lines, bullets, max(1, len(lines)), "of the lines"),
        ("ellipses", config.max_ellipsis_lines, ellipses, max(1, len(lines)), "of the lines"),
    ):
        if limit is not None and count / total > limit:
            return f"gopher_{name}", f"{count / total:.3f} {unit}"
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


def _has_stop_words(text: str, min_words: int) -> bool:
    """True if at least `min_words` different stop words occur; English text needs about one sentence for this."""
    seen: set[str] = set()
    for match in _STOP_WORD.finditer(text):
        seen.add(match.group().lower())
        if len(seen) >= min_words:
            break
    return len(seen) >= min_words


_PARAGRAPHS = re.compile(r"\n\s*\n")
_TOP = (2, 3, 4)
_DUPLICATE = (5, 6, 7, 8, 9, 10)


class GopherRepetition(Strict):
    """Largest shares of repetition in a document. A rule set to null is off; the defaults are those of table A1."""

    max_duplicate_lines: float | None = Field(default=0.30, ge=0, le=1)
    """Share of lines that repeat an earlier line."""
    max_duplicate_paragraphs: float | None = Field(default=0.30, ge=0, le=1)
    """Share of paragraphs that repeat an earlier one."""
    max_duplicate_line_characters: float | None = Field(default=0.20, ge=0, le=1)
    """Share of characters in such lines."""
    max_duplicate_paragraph_characters: float | None = Field(default=0.20, ge=0, le=1)
    """Share of characters in such paragraphs."""
    max_top_ngram: tuple[float, float, float] | None = (0.20, 0.18, 0.16)
    """Share of characters in the most frequent 2-, 3- and 4-gram of words."""
    max_duplicate_ngram: tuple[float, float, float, float, float, float] | None = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Share of characters in 5-, 6-, ... 10-grams that occur twice or more."""


def repetition_drop(text: str, words: WordHashes, lines: list[str], config: GopherRepetition) -> Drop | None:
    """The first rule that a document breaks, or None. Arguments as in `gopher.quality_drop`."""
    by_lines = (config.max_duplicate_lines, config.max_duplicate_line_characters)
    if drop := _duplicates(lines, "line", *by_lines):
        return drop
    by_paragraphs = (config.max_duplicate_paragraphs, config.max_duplicate_paragraph_characters)
    if by_paragraphs != (None, None):
        paragraphs = [stripped for part in _PARAGRAPHS.split(text) if (stripped := part.strip())]
        if drop := _duplicates(paragraphs, "paragraph", *by_paragraphs):
            return drop
    if config.max_top_ngram or config.max_duplicate_ngram:
        return _repeated_ngrams(words, config)
    return None


def _duplicates(parts: list[str], name: str, max_share: float | None, max_characters: float | None) -> Drop | None:
    """Checks the share of lines or paragraphs that repeat an earlier one of the document."""
    unique = set(parts)
    if len(unique) == len(parts):
        return None
    share = (len(parts) - len(unique)) / len(parts)
    if max_share is not None and share > max_share:
        return f"gopher_duplicate_{name}s", f"{share:.3f} of the {name}s"
    num_characters = sum(map(len, parts))
    share = (num_characters - sum(map(len, unique))) / num_characters
    if max_characters is not None and share > max_characters:
        return f"gopher_duplicate_{name}_characters", f"{share:.3f} of the characters"
    return None


def _repeated_ngrams(words: WordHashes, config: GopherRepetition) -> Drop | None:
    """The n-gram rules, n = 2 ... 10 in this order.

    An n-gram occurs twice only if both (n-1)-grams in it do, so each round looks only at the repeats of the round
    before. A text without repetition has few candidates left after the 2-grams. Characters are those of words, without
    spaces; characters in overlapping n-grams count once.
    """
    total = max(1, int(words.lengths.sum()))
    places = np.arange(len(words))
    hashes = words.hashes
    for n in (*_TOP, *_DUPLICATE):
        # Repeated (n-1)-grams whose successor is repeated too (all words if n is 2).
        follows = places[1:] == places[:-1] + 1
        places, hashes = places[:-1][follows], hashes[:-1][follows]
        if not len(places):
            return None
        hashes = extend_ngrams(hashes, words.hashes[places + n - 1])
        repeated, top = _repeats(hashes)
        if n in _TOP and config.max_top_ngram and top is not None:
            share = _covered(places[hashes == top], n, words.lengths) / total
            if share > config.max_top_ngram[_TOP.index(n)]:
                return f"gopher_top_{n}gram", f"{share:.3f} of the characters"
        places, hashes = places[repeated], hashes[repeated]
        if n in _DUPLICATE and config.max_duplicate_ngram:
            share = _covered(places, n, words.lengths) / total
            if share > config.max_duplicate_ngram[_DUPLICATE.index(n)]:
                return f"gopher_duplicate_{n}gram", f"{share:.3f} of the characters"
    return None


def _repeats(hashes: U64) -> tuple[NDArray[np.bool_], np.uint64 | None]:
    """A mask of the entries that occur at least twice, `(n,)`, and the most frequent entry (least hash if tied)."""
    values, places, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    top = int(np.argmax(counts))
    return counts[places] > 1, values[top] if counts[top] > 1 else None


def _covered(places: NDArray[np.int64], n: int, lengths: NDArray[np.int64]) -> int:
    """Characters of the words that n-grams at these places cover, each once."""
    edges = np.zeros(len(lengths) + 1, np.int64)
    np.add.at(edges, places, 1)  # overlapping n-grams count a character once
    np.add.at(edges, places + n, -1)
    return int(lengths[np.cumsum(edges[:-1]) > 0].sum())
