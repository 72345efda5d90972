"""Byte-level BPE as in GPT-2 (RoBERTa, DistilRoBERTa, `kind: train`) on tiktoken, with the ids of `tokenizers`.

GPT-2's pattern cuts a text into words, and adjacent pieces of a word are merged, lowest rank first, from bytes
upwards. `tokenizers` and tiktoken compute the same, but tiktoken's data structures are several times faster.

The ids could differ in two cases, and `obstacle` refuses such tokenizers:
- tiktoken ranks tokens, `tokenizers` ranks pairs. They agree if each merge makes a new token and each of these tokens,
  encoded alone, is that one token. Merges within a stretch of text depend on nothing outside it until one crosses its
  edge, so a token is then always made by the same pair.
- `tokenizers` first searches the text for added tokens that are not special; tiktoken does not know them.
"""

import re
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
_LONG_SPACES = re.compile(r"(?<!\s)\s{10000}")
"""Whitespace that could overflow the stack of tiktoken's pattern engine: 100,000 characters do not, a million do."""
_NUM_BYTES = 256
# White_Space of Unicode and all control characters of ASCII; in doubtful cases the slower pattern is used.
_BLANK = np.zeros(0x3002, bool)
_BLANK[[*range(0x21), 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]] = True


def obstacle(backend: Tokenizer, parsed: dict[str, Any]) -> str | None:
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
    merged = [first + second for first, second in _merges(model)]
    if len({*merged, *byte_letters()}) < len(merged) + _NUM_BYTES:
        return "two of its merges make the same token"
    apart = next((token for token in merged if len(backend.model.tokenize(token)) != 1), None)
    return None if apart is None else f"its token {apart!r}, encoded alone, is several tokens"


class ByteLevelBPE:
    """Encodes texts by tiktoken.

    Args:
        parsed: result of `parse` for a tokenizer without an `obstacle`.
    """

    def __init__(self, parsed: dict[str, Any]) -> None:
        vocab, letters = parsed["model"]["vocab"], byte_letters()
        tokens = [*letters, *(first + second for first, second in _merges(parsed["model"]))]
        self._ids = np.array([vocab[token] for token in tokens], np.uint32)
        to_byte = {letter: byte for byte, letter in enumerate(letters)}
        self._ranks = {bytes(map(to_byte.__getitem__, token)): rank for rank, token in enumerate(tokens)}
        self._single_spaces = self.engine(_SINGLE_SPACES)
        self._any_spaces: tiktoken.Encoding | None = None

    def encode(self, text: str) -> NDArray[np.uint32] | None:
        """Ids of a text, `(num_tokens,)`; None for ten thousand spaces in a row, on which tiktoken fails."""
        if _is_single_spaced(text):
            engine = self._single_spaces
        elif _LONG_SPACES.search(text):
            return None
        else:
            self._any_spaces = self._any_spaces or self.engine(_ANY_SPACES)
            engine = self._any_spaces
        ranks = engine.encode_ordinary(text)
        return self._ids.take(np.array(ranks, np.intp))

    def engine(self, pattern: str) -> tiktoken.Encoding:
        """Builds tiktoken on this vocabulary; its ids are ranks."""
        return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=self._ranks, special_tokens={})


def byte_letters() -> list[str]:
    """The letter for each byte in a byte-level vocabulary (GPT-2): Latin-1 where it is printable."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(_NUM_BYTES, 2 * _NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(_NUM_BYTES)]


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Merges, first to last."""
    return [tuple(merge) for merge in model["merges"]]


def _is_single_spaced(text: str) -> bool:
    """Returns True if no two whitespace characters are adjacent."""
    codec, width = ("ascii", np.uint8) if text.isascii() else ("utf-32-le", np.uint32)
    blank = _BLANK.take(np.frombuffer(text.encode(codec), width), mode="clip")
    return not (blank[1:] & blank[:-1]).any()
