"""Words of a text in any script."""

import re
import unicodedata
from itertools import pairwise

_MOST_CHARACTERS = 255
_MARKS = "".join(sign for sign in map(chr, range(0x300, 0x20000)) if unicodedata.category(sign)[0] == "M")
"""Vowel signs and accents that follow a letter, which `\\w` leaves out."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"  # scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese
_LETTER = rf"[^\W{_UNSPACED}]"
_WORD = re.compile(rf"[{_UNSPACED}]+|{_LETTER}+(?:[{_MARKS}]+{_LETTER}*)*")
_PLAIN_WORD = re.compile(r"\w+")
_SPECIAL = re.compile(rf"[{_UNSPACED}{_MARKS}]")
_UNSPACED_START = re.compile(rf"[{_UNSPACED}]")
_OTHER = re.compile(rf"[{_UNSPACED}]|\w(?![\ufe00-\ufe0f])[{_MARKS}]")  # signs but those that choose a form of an emoji


def lexical_words(text: str) -> list[str]:
    """Split into runs of letters, digits and underscores in lower case, each cut after 255 characters.

    A run in a script that is written without spaces gives each character and each two neighbours.
    """
    if not _SPECIAL.search(text):  # four times as fast
        return [run[:_MOST_CHARACTERS] for run in _PLAIN_WORD.findall(text.lower())]
    words: list[str] = []
    for run in _WORD.findall(text.lower()):
        if _UNSPACED_START.match(run):
            words += run
            words += map("".join, pairwise(run))
        else:
            words.append(run[:_MOST_CHARACTERS])
    return words


def has_other_words(text: str) -> bool:
    """True if the text has a script that is written without spaces, or signs that belong to letters."""
    return _OTHER.search(text) is not None


def num_words(text: str) -> int:
    """Runs between spaces; two characters count as a word if the text has a script that is written without spaces."""
    return -(-len(text) // 2) if _UNSPACED_START.search(text) else len(text.split())
