"""Removal of lines that are not part of a page's text: cookie notices, legal lines, navigation, sharing, counters.

The kinds follow the line-wise corrections of RefinedWeb (Penedo et al. 2023, arXiv:2306.01116, appendix G.2) and C4's
list of policies; the phrases are the project's, and English. Only short lines are checked, so that an article about
cookies keeps its paragraphs. Lines that are frequent over the whole corpus stay, because one document cannot show them.
"""

import re
from typing import Literal

from pydantic import Field

from declutr.common.config import Strict

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


class BoilerplateRemover:
    """Removes the configured kinds of lines by one combined pattern."""

    def __init__(self, config: Boilerplate) -> None:
        self._max_characters = config.max_line_characters
        patterns = [_PATTERNS[kind] for kind in dict.fromkeys(config.kinds)]
        self._pattern = re.compile("|".join(f"(?:{pattern})" for pattern in patterns), re.IGNORECASE)

    def remove(self, text: str) -> str:
        """The text without its boilerplate lines; the other lines, blank ones too, stay as they are."""
        lines = text.split("\n")
        kept = [line for line in lines if not self._is_boilerplate(line)]
        return text if len(kept) == len(lines) else "\n".join(kept)

    def _is_boilerplate(self, line: str) -> bool:
        if len(line) > self._max_characters:
            return False
        stripped = line.strip()
        return bool(stripped) and self._pattern.search(stripped) is not None
