"""Tokenization of texts with bounded memory, by the engine chosen for a tokenizer (engine.py)."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from declutr.pipeline.tokenizer.fast_engines import ByteLevelBPE, WordTable

EngineName = Literal["tiktoken", "wordpiece", "tokenizers"]
Ids = NDArray[np.uint32]
Item = TypeVar("Item")

_PIECE_CHARACTERS = 1_000_000
_BATCH_CHARACTERS = 250_000
_CUT = re.compile(r"(?<=\S) (?=\S)")
_WORDS_CUT = re.compile(r"(?<=[^\W_]) (?=[^\W_])")


def parse(backend: Tokenizer) -> dict[str, Any]:
    """A tokenizer's settings, vocabulary and merges as JSON values."""
    parsed: dict[str, Any] = json.loads(backend.to_str())
    return parsed


class BatchTokenizer:
    """Turns texts into ids without special tokens, a few megabytes at a time for texts of any length.

    A special token spelled out in a text ("</s>" in a web page) is encoded as its characters, so that stored tokens
    hold no special ids. Byte-level vocabularies distinguish a word at the start of a line from one after a space. With
    them, a text gets one leading space, so that a span from the middle of a document looks like any other.

    Args:
        backend: the tokenizer; its settings are changed, so it must not be shared.
        engine: library that applies it; only `tokenizers`, unless `choose_engine` (engine.py) found that the ids are
            the same.
        parsed: result of `parse` for the tokenizer, if the caller has it.

    Attributes:
        prefix: text put before every text that is not empty.
    """

    def __init__(
        self, backend: Tokenizer, engine: EngineName = "tokenizers", parsed: dict[str, Any] | None = None
    ) -> None:
        parsed = parse(backend) if parsed is None else parsed
        self._hidden = spelled_specials(backend, parsed)
        if self._hidden:
            backend = _without_pieces(parsed, self._hidden)
        self._backend = backend
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self.prefix = " " if "ByteLevel" in _types(parsed["pre_tokenizer"]) else ""
        self._cut = _safe_cut(parsed)
        self._fast: ByteLevelBPE | WordTable | None = None
        if engine == "tiktoken":
            self._fast = ByteLevelBPE(parsed)
        elif engine == "wordpiece":
            self._fast = WordTable(backend, parsed)

    @classmethod
    def load(cls, folder: Path, engine: EngineName = "tokenizers") -> "BatchTokenizer":
        """Loads the tokenizer of a folder written by `save_pretrained`."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), engine)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, `(num_tokens,)`; an empty text has none."""
        pieces: list[list[Ids]] = [[] for _ in texts]
        # Batches are small, because an encoding takes many times the memory of its text.
        for batch in batches(self._pieces(texts), lambda piece: len(piece[1]), _BATCH_CHARACTERS):
            encoded = self._encode([piece for _, piece in batch])
            for (index, _), ids in zip(batch, encoded, strict=True):
                pieces[index].append(ids)
        nothing = np.empty(0, np.uint32)  # an empty text has no pieces
        return [ids[0] if len(ids) == 1 else np.concatenate([*ids, nothing]) for ids in pieces]

    def _encode(self, pieces: list[str]) -> list[Ids]:
        """Ids of a few pieces."""
        if self._fast is None:
            return self._reference(pieces)
        encoded = ((piece, self._fast.encode(piece)) for piece in pieces)
        return [self._reference([piece])[0] if ids is None else ids for piece, ids in encoded]

    def _reference(self, pieces: list[str]) -> list[Ids]:
        """Ids by `tokenizers`, the reference."""
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _pieces(self, texts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Texts with their leading space, long ones cut before spaces."""
        for index, text in enumerate(texts):
            if not text:
                continue
            if self._hidden:
                text = text.replace("\0", " ")  # with which the hidden pieces begin
            start, text = 0, self.prefix + text
            while self._cut and len(text) - start > _PIECE_CHARACTERS:
                cut = self._cut.search(text, start + _PIECE_CHARACTERS)
                if cut is None:
                    break
                yield index, text[start : cut.start()]
                start = cut.start()
            yield index, text[start:]


def spelled_specials(backend: Tokenizer, parsed: dict[str, Any]) -> set[str]:
    """The special tokens that a text can spell, although the tokenizer does not look for them.

    They are pieces of its model: of Unigram (XLM-R's) in any text, of others where the pre-tokenizer leaves them whole.
    """
    backend.encode_special_tokens = True
    specials = {token["content"]: token["id"] for token in parsed["added_tokens"] if token["special"]}
    texts = [f"{content} a {content}a{content}" for content in specials]
    encoded = zip(specials.items(), backend.encode_batch_fast(texts, add_special_tokens=False), strict=True)
    spelled = {content for (content, number), encoding in encoded if number in encoding.ids}
    unknown = parsed["model"].get("unk_token")  # the model needs it, and a text that spells it is unknown
    return set(specials) if parsed["model"]["type"] == "Unigram" and spelled else spelled - {unknown}


def _without_pieces(parsed: dict[str, Any], hidden: set[str]) -> Tokenizer:
    """The tokenizer without special tokens, with the same ids.

    Hidden pieces get a NUL character, which no text holds. The scores of Unigram stay, because the least score decides
    how unknown characters are treated.
    """
    vocab: Any = parsed["model"]["vocab"]
    if isinstance(vocab, dict):
        vocab = {f"\0{piece}" if piece in hidden else piece: number for piece, number in vocab.items()}
    else:
        vocab = [[f"\0{piece}" if piece in hidden else piece, score] for piece, score in vocab]
    ordinary = [token for token in parsed["added_tokens"] if not token["special"]]
    changed = {"model": {**parsed["model"], "vocab": vocab}, "added_tokens": ordinary, "post_processor": None}
    return Tokenizer.from_str(json.dumps({**parsed, **changed}))


def _safe_cut(parsed: dict[str, Any]) -> re.Pattern[str] | None:
    """Spaces before which a text may be cut without a change of its ids; None if there are none for certain."""
    if any(token["rstrip"] or " " in token["content"] for token in parsed["added_tokens"]):
        return None
    before = parsed["pre_tokenizer"] or {}
    if before.get("type") == "ByteLevel":
        # GPT-2's pattern never matches across a space between two words, except that a match may start with it.
        return _CUT if before["use_regex"] and parsed["normalizer"] is None else None
    # SentencePiece (XLM-R): each word is tokenized alone, with the sign that replaced the space before it. Normalisers
    # can turn other characters into spaces, so the space must be between letters or digits.
    steps = [step["type"] for step in (parsed["normalizer"] or {}).get("normalizers", [parsed["normalizer"]]) if step]
    splitters = [part for part in before.get("pretokenizers", [before]) if part.get("type") != "WhitespaceSplit"]
    facts = [(part.get("type"), part.get("split"), part.get("prepend_scheme")) for part in splitters]
    by_word = {"Precompiled", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Replace"}
    return _WORDS_CUT if facts == [("Metaspace", True, "always")] and by_word.issuperset(steps) else None


def _types(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """Types of a pre-tokenizer and of its parts."""
    if pre_tokenizer is None:
        return []
    inner = pre_tokenizer.get("pretokenizers", [])
    return [pre_tokenizer["type"], *(name for part in inner for name in _types(part))]


def batches(
    items: Iterable[Item], size: Callable[[Item], int], max_size: int, most_items: int = sys.maxsize
) -> Iterator[list[Item]]:
    """Groups items in order; a group ends when its sizes add up to `max_size`, or with `most_items` items."""
    group: list[Item] = []
    group_size = 0
    for item in items:
        group.append(item)
        group_size += size(item)
        if group_size >= max_size or len(group) >= most_items:
            yield group
            group, group_size = [], 0
    if group:
        yield group
