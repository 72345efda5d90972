"""The rules of the filters: those of Gopher and C4, and those of boilerplate.

Gopher on quality and repetition: Rae et al. 2021 (arXiv:2112.11446), appendix A.1.1 and table A1. The paper does not
define words and lines. Here a word is text between whitespace, and blank lines do not count.

C4: Raffel et al. 2020 (JMLR 21, section 2.2). Lines are removed first, then the remaining text is judged; two rules
look at the whole page. The first version of the paper (October 2019) has five sentences and three words; the defaults
here are those of the journal and of the released code. C4 also removes all but one of any three-sentence span that
occurs more than once in the corpus. A single document cannot show this; see pipeline/duplicates for copies of
documents.

Boilerplate, whose lines are removed: the kinds follow the line-wise corrections of RefinedWeb (Penedo et al. 2023,
arXiv:2306.01116, appendix G.2) and C4's list of policies; the phrases are the project's, and English. Only short lines
are checked, so that an article about cookies keeps its paragraphs. Lines that are frequent over the whole corpus stay,
because one document cannot show them.
"""

import re
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from declutr.common.config import Strict
from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.pipeline.filters.words import U64, WordHashes, extend_ngrams

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_STOP_WORD = re.compile(rf"\b(?:{'|'.join(STOP_WORDS)})\b", re.IGNORECASE)
_BULLETS = frozenset("•‣▶◀◦■□▪▫●○·*-–")
_ELLIPSES = ("...", "…")

Drop = tuple[str, str]  # reason, and the figure that decided


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
    """Most hash signs, or ellipses, per word."""
    max_bullet_lines: float | None = Field(default=0.9, ge=0, le=1)
    """Share of lines that start with a bullet."""
    max_ellipsis_lines: float | None = Field(default=0.3, ge=0, le=1)
    """Share of lines that end with an ellipsis."""
    min_words_with_letter: float | None = Field(default=0.8, ge=0, le=1)
    """Share of words with a letter of any script."""
    min_stop_words: int | None = Field(default=2, ge=0, le=len(STOP_WORDS))
    """Least number of different English stop words; null: any."""


def quality_drop(
    text: str,  # the document with its lines
    words: WordHashes,  # its words, not folded
    lines: list[str],  # its lines, stripped, without blank ones
    config: GopherQuality,  # the thresholds
) -> Drop | None:
    """The first rule that a document breaks, or None."""
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
    """The first rule that a document breaks, or None. Arguments as in `quality_drop`."""
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


Kind = Literal["cookies", "legal", "navigation", "sharing", "counters"]

_PATTERNS: dict[Kind, str] = {
    "cookies": r"(?:this|our) (?:web)?site uses cookies|\bwe use cookies\b|\bby using (?:this|our) (?:web)?site,? you "
    r"(?:agree|consent)|^accept (?:all )?cookies\W*$|\bcookie (?:policy|settings|preferences|notice)\b",
    "legal": r"\ball rights reserved\b|^(?:©|\(c\)|copyright\b).{0,80}\b(?:19|20)\d\d\b|^(?:terms (?:of|and) "
    r"(?:use|service|conditions)|privacy (?:policy|statement|notice)|disclaimer|imprint)\W*$",
    "navigation": r"^(?:skip to (?:main )?content|(?:go )?back to top|(?:main )?menu|home|search|sitemap|previous"
    r"(?: (?:page|post|article))?|next(?: (?:page|post|article))?|sign[ -]?in|log[ -]?in|sign up|register|subscribe"
    r"(?: now)?|(?:read|load|show|view) more|continue reading|leave a (?:reply|comment)|print this page|contact us"
    r"|about us|you are here)\b.{0,3}$|^(?:[^|»›>•]{1,30}[|»›>•]){3,}[^|»›>•]{0,30}$",
    "sharing": r"^(?:share|tweet|pin|email|follow us|like us|share this|share on|follow us on|like us on|tweet this)"
    r"(?: (?:this|on|via|to|article|post|story|page|and|facebook|twitter|x|linkedin|pinterest|reddit|whatsapp"
    r"|instagram|email|youtube)[,.!:]?)*\W*$",
    "counters": r"^[\d.,]+\s?[km]?\s+(?:likes?|shares?|comments?|views?|replies|reply|retweets?|followers?|votes?"
    r"|reads?|downloads?)\W*$|^(?:page )?\d+ of \d+\W*$|^[\d\s.,:/|-]+$",
}


class Boilerplate(Strict):
    """Lines to remove from a document. A document without other lines is dropped, reason only_boilerplate."""

    kinds: list[Kind] = Field(default=["cookies", "legal", "navigation", "sharing", "counters"], min_length=1)
    """Kinds of lines to remove."""
    max_line_characters: int = Field(default=160, ge=1)
    """Longer lines stay, whatever their text."""


@lru_cache(maxsize=4)
def _boilerplate(kinds: tuple[Kind, ...]) -> re.Pattern[str]:
    """One pattern of several kinds of lines."""
    return re.compile("|".join(f"(?:{_PATTERNS[kind]})" for kind in dict.fromkeys(kinds)), re.IGNORECASE)


def without_boilerplate(text: str, config: Boilerplate) -> str:
    """The text without its boilerplate lines; the other lines, blank ones too, stay as they are."""
    pattern, lines = _boilerplate(tuple(config.kinds)), text.split("\n")
    kept = [
        line
        for line in lines
        if len(line) > config.max_line_characters or not (words := line.strip()) or not pattern.search(words)
    ]
    return text if len(kept) == len(lines) else "\n".join(kept)


_CLOSING = "\"'”’»)]"
_TERMINAL = (".", "!", "?", '"', "”", "。", "！", "？")
_CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed|note \d{1,2})\]", re.IGNORECASE)
_SENTENCE_END = re.compile(rf"[.!?][{re.escape(_CLOSING)}]*(?=\s|$)|[。！？]")  # no space follows a sign of CJK
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_WORD = re.compile(r"\w+")


class C4Rules(Strict):
    """The rules of C4, each with a switch; the defaults are the paper's."""

    terminal_punctuation: bool = True
    """Keep only lines that end in . ! ? or a quotation mark."""
    min_line_words: int | None = Field(default=5, ge=1)
    """Least words of a line; null: any."""
    javascript: bool = True
    """Remove lines with "javascript"."""
    policies: bool = True
    """Remove lines about terms of use, privacy and cookies."""
    citations: bool = True
    """Remove the marks [1], [edit], [citation needed]."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents with a {."""
    min_sentences: int | None = Field(default=3, ge=1)
    """Least sentences of a document; null: any."""
    bad_words: str | None = None
    """File of words, one a line; documents with one are dropped. null: none."""


def c4_problems(config: C4Rules) -> list[str]:
    """Finds problems of the settings, one line each."""
    if config.bad_words is None:
        return []
    try:
        path = expand(config.bad_words)
    except UsageError as error:
        return [f"filters.c4.bad_words: {error}"]
    try:
        bad_words = _bad_words(path, path.stat().st_mtime_ns)
    except OSError as error:
        return [f"filters.c4.bad_words = {config.bad_words!r}: {error.strerror}; looked at {path.absolute()}"]
    except UnicodeDecodeError as error:
        return [f"filters.c4.bad_words = {config.bad_words!r}: not UTF-8 ({error.reason} at byte {error.start})"]
    if not any(bad_words):
        return [f"filters.c4.bad_words = {config.bad_words!r}: holds no words; write one word or phrase a line"]
    return []


def c4_page(text: str, config: C4Rules) -> Drop | None:
    """The rules on a whole page."""
    if config.curly_bracket and (place := text.find("{")) >= 0:
        return "c4_curly_bracket", f"at character {place}"
    if not config.lorem_ipsum and not config.bad_words:
        return None
    lowered = text.lower()
    if config.lorem_ipsum and (place := lowered.find("lorem ipsum")) >= 0:
        return "c4_lorem_ipsum", f"at character {place}"
    if config.bad_words:
        path = expand(config.bad_words)
        words, phrases = _bad_words(path, path.stat().st_mtime_ns)
        if both := words.intersection(_WORD.findall(lowered)):  # words before phrases, each in alphabetical order
            return "c4_bad_words", min(both)
        if match := next(filter(None, (phrase.search(lowered) for phrase in phrases)), None):
            return "c4_bad_words", match.group()
    return None


def c4_lines(text: str, config: C4Rules) -> tuple[str, Drop | None]:
    """The text without the lines and marks that the rules remove, and the reason to drop the rest, or None."""
    if config.citations and "[" in text:
        text = _CITATION.sub("", text)
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    kept = "\n".join(line for line in lines if _is_kept(line, config))
    if lines and not kept:
        return kept, ("c4_no_lines", f"{len(lines)} lines removed")
    if config.min_sentences is not None:
        # No more than decide.
        num_sentences = sum(1 for _ in islice(_SENTENCE_END.finditer(kept), config.min_sentences))
        if num_sentences < config.min_sentences:
            return kept, ("c4_sentences", f"{num_sentences} sentences in {len(lines)} lines")
    return kept, None


def _is_kept(line: str, config: C4Rules) -> bool:
    """Returns True if a stripped line is kept."""
    if config.terminal_punctuation and (not line.endswith(_TERMINAL) or line.endswith(_ELLIPSES)):
        return False
    min_words = config.min_line_words
    if min_words is not None and len(line.split(None, min_words - 1)) < min_words:  # no more splits than decide
        return False
    if not config.javascript and not config.policies:
        return True
    lowered = line.lower()
    if config.javascript and "javascript" in lowered:
        return False
    return not (config.policies and any(phrase in lowered for phrase in _POLICIES))


@lru_cache(maxsize=4)
def _bad_words(path: Path, modified_ns: int) -> tuple[frozenset[str], list[re.Pattern[str]]]:  # noqa: ARG001
    """Reads a list from its file, again if its time has changed: words to look up and phrases to search, lower-cased.

    Runs of letters and digits are words, all other entries are phrases.
    """
    entries = sorted({" ".join(line.lower().split()) for line in path.read_text("utf-8").splitlines()} - {""})
    # Not \b: an entry may begin or end with a sign.
    phrases = [rf"(?<!\w){re.escape(entry)}(?!\w)" for entry in entries if not _WORD.fullmatch(entry)]
    words = frozenset(entry for entry in entries if _WORD.fullmatch(entry))
    return words, [re.compile(phrase.replace(r"\ ", r"\s+")) for phrase in phrases]  # a line may end within a phrase
