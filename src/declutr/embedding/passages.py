"""Passages of a text, each of which an encoder reads whole, cut where the text has a break.

A passage ends at the strongest break in the second half of its window: before a heading, after a blank line, after a
sentence, after a line, between words; a heading also ends one of a quarter of a window. Together they hold the whole
text but white space. Headings are those of Markdown and lines that are underlined.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from declutr.common.errors import UsageError
from declutr.encoders.protocol import SentenceEncoder, Window

_HEADING, _PARAGRAPH, _SENTENCE, _LINE, _WORD, _INSIDE = 5, 4, 3, 2, 1, 0
_MARKS = "=-~^\"'*+`"  # by level
_STARTS = re.compile(
    r"^(?:(?P<hashes>#{1,6})[ \t]+(?P<title>\S[^\n]*)|(?P<fence>```|~~~)"
    r"|(?P<line>[^\s\W][^\n]{0,99})\n(?P<mark>[=\-~^\"'*+`])(?P=mark){2,}[ \t]*$)",
    re.MULTILINE,
)
_PARAGRAPHS = re.compile(r"\n[ \t\r]*\n\s*")
_LINES = re.compile(r"\n\s*")
_SENTENCES = re.compile(r"[.!?…؟।][\"'”’»)\]]*\s+|[。！？][」』）]*")
# ascending: a stronger break overwrites a weaker one
_PATTERNS = (_LINE, _LINES), (_SENTENCE, _SENTENCES), (_PARAGRAPH, _PARAGRAPHS)
_SPACE = re.compile(r"\s*")
_MARGIN = 2  # tokens: a passage may have more alone than within its text, as of a first word without its space
_BLOCK_CHARACTERS = 1_000_000  # whose tokens fit in memory


@dataclass(frozen=True)
class Passage:
    """A part of a text."""

    start: int  # first character
    end: int  # character behind the last
    line: int  # line of the text in which it starts, from 1
    heading: str  # headings above it, from the outermost, joined by ` > `; empty if none were asked for or none fit

    def of(self, text: str) -> str:
        """The words to embed: the headings, and behind them the part of its text."""
        part = text[self.start : self.end]
        return f"{self.heading}\n{part}" if self.heading else part


class Cutter:
    """Cuts texts to passages of at most the tokens that an encoder reads."""

    def __init__(
        self,
        encoder: SentenceEncoder,  # whose window a passage fits
        headings: bool = False,  # put the headings above a passage before it, in at most a quarter of the window
    ) -> None:
        window: Window | None = getattr(getattr(encoder, "whole", encoder), "window", None)
        if window is None:  # words alone
            raise UsageError(f"--passages: {encoder.name} has no tokenizer and reads a text of any length; omit it")
        self._window = window
        self._limit = max(1, window.tokens - _MARGIN)
        self._headings = headings

    def passages(self, text: str) -> list[Passage]:
        """Passages of a text in their order; one without characters for a text without tokens."""
        outline = list(_outline(text))
        above = _Above(outline if self._headings else [])
        passages, line, counted = list[Passage](), 1, 0
        for first, last in _blocks(text):
            for start, end, heading in self._cut(text[first:last], first, [place for place, _, _ in outline], above):
                # only from the last start on: a long text would be counted again for each passage
                line += text.count("\n", counted, start)
                counted = start
                passages.append(Passage(start, end, line, heading))
        return passages or [Passage(0, 0, 1, "")]

    def _cut(self, block: str, offset: int, starts: list[int], above: "_Above") -> Iterator[tuple[int, int, str]]:
        """First character, character behind the last, and headings of each passage of a block of a text."""
        encoding = self._window.engine.encode(block, add_special_tokens=False)
        if not len(encoding):
            return
        places = np.maximum.accumulate(np.array(encoding.offsets, np.int64))  # searchsorted needs ends that ascend
        breaks = _breaks(block, places, [place - offset for place in starts])
        first = 0
        while first < len(places):
            begin = _skip_space(block, int(places[first, 0]) if first else 0)
            heading, used = self._heading(above.path(offset + begin))
            first = _end(breaks, first, self._limit - used)
            part = block[begin : places[first, 0] if first < len(places) else len(block)].rstrip()
            if part:
                yield offset + begin, offset + begin + len(part), heading

    def _heading(self, path: list[str]) -> tuple[str, int]:
        """The headings that fit, without the outermost ones, and their number of tokens."""
        for number in range(len(path)):
            heading = " > ".join(path[number:])
            if len(heading) > 8 * self._limit:  # of a line that no one would call a heading: counted for each passage
                continue
            used = len(self._window.engine.encode(heading, add_special_tokens=False)) + 1  # 1: its line break
            if 4 * used <= self._limit:
                return heading, used
        return "", 0


class _Above:
    """Headings above characters that ascend, from an outline, each of whose headings is looked at once."""

    def __init__(self, outline: list[tuple[int, int, str]]) -> None:
        self._outline, self._next, self._path = outline, 0, list[tuple[int, str]]()

    def path(self, place: int) -> list[str]:
        """Titles above a character, from the outermost; a heading that starts there is part of its passage."""
        while self._next < len(self._outline) and self._outline[self._next][0] <= place:
            start, level, title = self._outline[self._next]
            self._path = [(depth, name) for depth, name in self._path if depth < level]
            if start == place:
                break  # it is above what follows
            self._path.append((level, title))
            self._next += 1
        return [name for _, name in self._path]


def _outline(text: str) -> Iterator[tuple[int, int, str]]:
    """First character, level and title of each heading outside of fenced code."""
    fence = None
    for match in _STARTS.finditer(text):
        if match["fence"]:
            fence = None if fence == match["fence"] else fence or match["fence"]
        elif fence is None and match["hashes"]:
            yield match.start(), len(match["hashes"]), match["title"].strip(" \t\r#")
        elif fence is None:
            yield match.start(), 1 + _MARKS.index(match["mark"]), match["line"].strip()


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Bounds of parts of a text of at most a million characters, which end with a paragraph, line or word if they can.

    A tokenizer holds about a hundred bytes for each of their tokens.
    """
    start = 0
    while len(text) - start > _BLOCK_CHARACTERS:
        end = start + _BLOCK_CHARACTERS
        breaks = (text.rfind(mark, start + 1, end) for mark in ("\n\n", "\n", " "))
        end = next((place for place in breaks if place > start), end)
        yield start, end
        start = end
    yield start, len(text)


def _skip_space(block: str, place: int) -> int:
    """First character at or behind a place that is no white space."""
    match = _SPACE.match(block, place)
    return match.end() if match else place


def _breaks(block: str, places: NDArray[np.int64], headings: list[int]) -> NDArray[np.int8]:
    """`(tokens,)` strength of the break before each token with these characters `(tokens, 2)`."""
    breaks = np.full(len(places), _INSIDE, np.int8)
    breaks[1:][places[1:, 0] > places[:-1, 1]] = _WORD
    # A token may start with the space before its word, and then ends behind the break.
    for strength, characters in (
        *((strength, [match.end() for match in pattern.finditer(block)]) for strength, pattern in _PATTERNS),
        (_HEADING, [place for place in headings if 0 <= place < len(block)]),
    ):
        tokens = np.searchsorted(places[:, 1], np.array(characters, np.int64), side="right")
        breaks[tokens[tokens < len(places)]] = strength
    return breaks


def _end(breaks: NDArray[np.int8], first: int, limit: int) -> int:
    """Token behind the last of the passage that starts at a token."""
    end = min(first + limit, len(breaks))
    headings = np.flatnonzero(breaks[first + limit // 4 + 1 : end] == _HEADING)
    if len(headings):
        return first + limit // 4 + 1 + int(headings[0])
    if end == len(breaks):
        return end
    near = breaks[first + limit // 2 + 1 : end + 1]
    # the last of the strongest, because argmax takes the first and the order is reversed
    return end - int(near[::-1].argmax()) if len(near) else end
