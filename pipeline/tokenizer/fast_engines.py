"""Engines that give the ids of `tokenizers` several times as fast: byte-level BPE by tiktoken, WordPiece by a table.

`ByteLevelBPE` is byte-level BPE as in GPT-2 (RoBERTa, DistilRoBERTa, `kind: train`), by tiktoken.

GPT-2's pattern cuts a text into words, and adjacent pieces of a word are merged, lowest rank first, from bytes
upwards. `tokenizers` and tiktoken compute the same, but tiktoken's data structures are several times faster.

The ids could differ in two cases, and `bytelevel_obstacle` refuses such tokenizers:
- tiktoken ranks tokens, `tokenizers` ranks pairs. They agree if each merge makes a new token and each of these tokens,
  encoded alone, is that one token. Merges within a stretch of text depend on nothing outside it until one crosses its
  edge, so a token is then always made by the same pair.
- `tokenizers` first searches the text for added tokens that are not special; tiktoken does not know them.

`WordTable` is WordPiece as in BERT, by a table of pieces with known ids.

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
import tiktoken
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Alternatives that start with different characters may have any order; words, the most frequent, come first.
_WORDS = r" ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
# A run of whitespace leaves its last character to the word after it. The look-ahead costs a third of the speed and is
# needed only if two whitespace characters are adjacent.
_ANY_SPACES = _WORDS + r"|\s+(?!\S)|\s+"
_SINGLE_SPACES = _WORDS + r"|\s+"
# Whitespace that could overflow the stack of tiktoken's pattern engine: 100,000 characters do not, a million do.
_LONG_SPACES = re.compile(r"(?<!\s)\s{10000}")
_NUM_BYTES = 256
# White_Space of Unicode and all control characters of ASCII; in doubtful cases the slower pattern is used.
_BLANK = np.zeros(0x3002, bool)
_BLANK[[*range(0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]] = True
_MOST_PIECES = 1 << 17  # largest number of pieces in the table, about 30 MB; a full table is emptied
_LONGEST = 48  # characters of the longest piece in the table. Longer pieces are rarely repeated.
_CHARACTERS_AT_ONCE = 1 << 17  # a longer text is cut before a space or sign after this many characters
_SPACES = " \t\n\r"
_MAYBE_SIGNS = [*range(0x21, 0xC0), *range(0x2010, 0x2060), *range(0x3001, 0x3040), *range(0x3400, 0xA000)]
_MAYBE_SIGNS += range(0xFF01, 0xFF66)
"""Code points that may be signs: ASCII, Latin-1, general punctuation, CJK and its punctuation."""


def bytelevel_obstacle(backend: Tokenizer, parsed: dict[str, Any]) -> str | None:
    """The reason why tiktoken cannot replace this tokenizer; None if it can."""
    model, before = parsed["model"], parsed["pre_tokenizer"] or {}
    if model["type"] != "BPE" or before.get("type") != "ByteLevel" or not before["use_regex"]:
        return f"it is {model['type']} after {before.get('type')}, not BPE over bytes with GPT-2's pattern"
    if parsed["normalizer"] is not None:
        return f"it normalises text ({parsed['normalizer']['type']})"
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "byte_fallback"):
        if model.get(setting):
            return f"its model has {setting} = {model[setting]!r}"
    ordinary = [token["content"] for token in parsed["added_tokens"] if not token["special"]]
    if ordinary:
        return f"it has added tokens that are not special, such as {ordinary[0]!r}"
    missing = [letter for letter in byte_letters() if letter not in model["vocab"]]
    if missing:
        return f"its vocabulary has no token for {len(missing)} of {_NUM_BYTES} bytes"
    merged = ["".join(merge) for merge in model["merges"]]
    if len({*merged, *byte_letters()}) < len(merged) + _NUM_BYTES:
        return "two of its merges make the same token"
    unstable = next((token for token in merged if len(backend.model.tokenize(token)) != 1), None)
    return None if unstable is None else f"its token {unstable!r}, encoded alone, is several tokens"


class ByteLevelBPE:
    """Encodes texts by tiktoken."""

    def __init__(
        self,
        parsed: dict[str, Any],  # result of `parse` for a tokenizer without an `obstacle`
    ) -> None:
        vocab, letters = parsed["model"]["vocab"], byte_letters()
        tokens = [*letters, *("".join(merge) for merge in parsed["model"]["merges"])]
        self._ids = np.array([vocab[token] for token in tokens], np.uint32)
        to_byte = {letter: byte for byte, letter in enumerate(letters)}
        self._ranks = {bytes(map(to_byte.__getitem__, token)): rank for rank, token in enumerate(tokens)}
        self._single_spaces = self.engine(_SINGLE_SPACES)
        self._any_spaces: tiktoken.Encoding | None = None

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Ids of a text, `(num_tokens,)`; None if a run of whitespace could be too long for tiktoken."""
        if _is_single_spaced(text):
            engine = self._single_spaces
        elif _LONG_SPACES.search(text):
            return None
        else:
            self._any_spaces = self._any_spaces or self.engine(_ANY_SPACES)
            engine = self._any_spaces
        ranks = array("I", engine.encode_ordinary(text))  # NumPy takes three times as long to read a list
        return self._ids[np.frombuffer(ranks, np.uint32)]

    def engine(self, pattern: str) -> tiktoken.Encoding:
        """Builds tiktoken on this vocabulary; its ids are ranks."""
        return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={})


def byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary (GPT-2): Latin-1 where it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(_NUM_BYTES)]


def _is_single_spaced(text: str) -> bool:
    """Returns True if no two whitespace characters are adjacent."""
    if "  " not in text and text.isprintable():  # no control character, and no whitespace but the space
        return True
    codec, width = ("ascii", np.uint8) if text.isascii() else ("utf-32-le", np.uint32)
    blank = _BLANK.take(np.frombuffer(text.encode(codec), width), mode="clip")
    return not (blank[1:] & blank[:-1]).any()


def wordpiece_obstacle(parsed: dict[str, Any]) -> str | None:
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
    for character in map(chr, _MAYBE_SIGNS):
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normalise(f"a{character}a"))]
        if len(words) == 3 and not any(map(unicodedata.combining, unicodedata.normalize("NFD", character))):
            yield character


def _stretches(text: str, edge: re.Pattern[str]) -> Iterator[str]:
    """Cuts a text into stretches, each at the first space or sign after `_CHARACTERS_AT_ONCE`, if there is one.

    Chinese has no spaces, but each of its characters is a sign.
    """
    start = 0
    while len(text) - start > _CHARACTERS_AT_ONCE and (boundary := edge.search(text, start + _CHARACTERS_AT_ONCE)):
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]
