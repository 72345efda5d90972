"""WordPiece as in BERT, by a table of pieces with known ids; gives the ids of `tokenizers`.

No step of such a tokenizer looks across a space or a sign. The normaliser maps character by character, decomposition
reorders accents only between two characters that are not accents, the pre-tokenizer cuts at whitespace and around
signs, and the model sees single words. So the ids of a text are the ids of its pieces, one after the other. The
tokenizer itself decides what is a sign, and `tokenizers` computes the ids of a new piece. Only one rule is repeated
here: letters and digits of ASCII are one word, in lower case if the normaliser lowers it.
"""

import re
import unicodedata
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_MOST_PIECES = 1 << 17
"""Largest number of pieces in the table, about 30 MB; a full table is emptied."""
_LONGEST = 48
"""Characters of the longest piece in the table. Longer pieces are rarely repeated."""
_CHARACTERS_AT_ONCE = 1 << 17
_SPACES = " \t\n\r"
_CANDIDATES = [*range(0x21, 0xC0), *range(0x2010, 0x2060), *range(0x3001, 0x3040), *range(0x3400, 0xA000)]
_CANDIDATES += range(0xFF01, 0xFF66)
"""Code points that may be signs: ASCII, Latin-1, general punctuation, CJK and its punctuation."""


def obstacle(parsed: dict[str, Any]) -> str | None:
    """The reason why a table of pieces cannot replace a tokenizer with these settings (`parse`); None if it can."""
    kinds = [(parsed[step] or {}).get("type") for step in ("normalizer", "pre_tokenizer", "model")]
    if kinds[1:] != ["BertPreTokenizer", "WordPiece"] or kinds[0] not in (None, "BertNormalizer"):
        return f"it is {kinds[2]} after {kinds[0]} and {kinds[1]}, not WordPiece as in BERT"
    ordinary = [token["content"] for token in parsed["added_tokens"] if not token["special"]]
    return f"it has added tokens that are not special, such as {ordinary[0]!r}" if ordinary else None


class WordTable:
    """Encodes texts by a table of pieces, which `tokenizers` fills.

    Args:
        backend: a tokenizer without an `obstacle`, which treats special tokens in a text as plain characters.
        parsed: its settings.
    """

    def __init__(self, backend: Tokenizer, parsed: dict[str, Any]) -> None:
        self._pieces = _Pieces(backend, bool((parsed["normalizer"] or {}).get("lowercase")))
        signs = re.escape("".join(_signs(backend)))
        self._find = re.compile(f"[^{_SPACES}{signs}]+|[{signs}]").findall
        self._edge = re.compile(f"[ {signs}]")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text, `(num_tokens,)`."""
        look_up = self._pieces.__getitem__
        ids = [b"".join(map(look_up, self._find(stretch))) for stretch in _stretches(text, self._edge)]
        return np.frombuffer(b"".join(ids), np.uint32)


class _Pieces(dict[str, bytes]):
    """Ids of pieces as bytes of uint32; a piece is encoded when it is first looked up."""

    def __init__(self, backend: Tokenizer, lowercase: bool) -> None:
        super().__init__()
        self._backend, self._model, self._lowercase = backend, backend.model, lowercase

    def __missing__(self, piece: str) -> bytes:
        if piece.isascii() and piece.isalnum():
            tokens = self._model.tokenize(piece.lower() if self._lowercase else piece)
            ids = array("I", [token.id for token in tokens]).tobytes()
        else:
            (encoding,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            ids = array("I", encoding.ids).tobytes()
        if len(piece) <= _LONGEST:
            if len(self) >= _MOST_PIECES:
                self.clear()
            self[piece] = ids
        return ids


def _signs(backend: Tokenizer) -> Iterator[str]:
    """Characters that this tokenizer treats as words and that no accent is reordered across."""
    normalise = backend.normalizer.normalize_str if backend.normalizer else str
    for character in map(chr, _CANDIDATES):
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalise(f"a{character}a"))]
        if len(words) == 3 and not any(map(unicodedata.combining, unicodedata.normalize("NFD", character))):
            yield character


def _stretches(text: str, edge: re.Pattern[str]) -> Iterator[str]:
    """Cuts the text before spaces and signs into stretches of bounded length, if it has any.

    Chinese has no spaces, but each of its characters is a sign.
    """
    start = 0
    while len(text) - start > _CHARACTERS_AT_ONCE and (boundary := edge.search(text, start + _CHARACTERS_AT_ONCE)):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]
