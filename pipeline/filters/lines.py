"""Rules that remove lines: those of C4 (Raffel et al. 2020, JMLR 21, section 2.2), and boilerplate.

Lines are removed first, then the remaining text is judged; two rules look at the whole page. The first version of the
paper (October 2019) has five sentences and three words; the defaults here are those of the journal and of the released
code. C4 also removes all but one of any three-sentence span that occurs more than once in the corpus. A single document
cannot show this; see pipeline/duplicates for copies of documents.

The kinds follow the line-wise corrections of RefinedWeb (Penedo et al. 2023, arXiv:2306.01116, appendix G.2) and C4's
list of policies; the phrases are the project's, and English. Only short lines are checked, so that an article about
cookies keeps its paragraphs. Lines that are frequent over the whole corpus stay, because one document cannot show them.
"""

import re
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

from pydantic import Field

from declutr.common.config import Strict
from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.pipeline.filters.gopher import Drop

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
_ELLIPSES = ("...", "…")
_CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed|note \d{1,2})\]", re.IGNORECASE)
_SENTENCE_END = re.compile(rf"[.!?][{re.escape(_CLOSING)}]*(?=\s|$)|[。！？]")
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_WORD = re.compile(r"\w+")


class C4Rules(Strict):
    """The rules of C4, each with a switch; the defaults are the paper's."""

    terminal_punctuation: bool = True
    """Keep only lines that end in . ! ? or a quotation mark, not in an ellipsis."""
    min_line_words: int | None = Field(default=5, ge=1)
    """Keep only lines of at least this many words; null: all."""
    javascript: bool = True
    """Remove lines with "javascript"."""
    policies: bool = True
    """Remove lines about terms of use, privacy policies and cookies."""
    citations: bool = True
    """Remove the marks [1], [edit], [citation needed]."""
    lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum"."""
    curly_bracket: bool = True
    """Drop documents with a {."""
    min_sentences: int | None = Field(default=3, ge=1)
    """Drop documents of fewer sentences, counted by . ! ? before whitespace; null: any."""
    bad_words: str | None = None
    """Text file of words and phrases, one a line; documents that hold one are dropped. null: none."""


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
        num_sentences = sum(1 for _ in islice(_SENTENCE_END.finditer(kept), config.min_sentences))
        if num_sentences < config.min_sentences:
            return kept, ("c4_sentences", f"{num_sentences} sentences in {len(lines)} lines")
    return kept, None


def _is_kept(line: str, config: C4Rules) -> bool:
    """Returns True if a stripped line is kept."""
    if config.terminal_punctuation and (not line.endswith(_TERMINAL) or line.endswith(_ELLIPSES)):
        return False
    min_words = config.min_line_words
    if min_words is not None and len(line.split(None, min_words - 1)) < min_words:
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
    phrases = [rf"(?<!\w){re.escape(entry)}(?!\w)" for entry in entries if not _WORD.fullmatch(entry)]
    words = frozenset(entry for entry in entries if _WORD.fullmatch(entry))
    return words, [re.compile(phrase.replace(r"\ ", r"\s+")) for phrase in phrases]
