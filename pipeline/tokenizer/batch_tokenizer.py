"""Tokenization of texts with bounded memory, and the choice of its engine: a faster one if tests show the same ids."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from declutr.common import seeding
from declutr.common.errors import ConfigError
from declutr.pipeline.tokenizer.fast_engines import (
    ByteLevelBPE,
    WordTable,
    byte_letters,
    bytelevel_obstacle,
    wordpiece_obstacle,
)
from declutr.pipeline.tokenizer.tokenization import EngineSetting

EngineName = Literal["tiktoken", "wordpiece", "tokenizers"]
Ids = NDArray[np.uint32]
Item = TypeVar("Item")

_PIECE_CHARACTERS = 1_000_000  # a longer text is encoded in pieces
_BATCH_CHARACTERS = 250_000  # pieces are encoded together up to this sum
_CUT = re.compile(r"(?<=\S) (?=\S)")  # a single space
_WORDS_CUT = re.compile(r"(?<=[^\W_]) (?=[^\W_])")  # a single space between letters or digits


def parse(backend: Tokenizer) -> dict[str, Any]:
    """A tokenizer's settings, vocabulary and merges as JSON values."""
    return json.loads(backend.to_str())


class BatchTokenizer:
    """Turns texts into ids without special tokens, a few megabytes at a time for texts of any length.

    A special token spelled out in a text ("</s>" in a web page) is encoded as its characters, so that stored tokens
    hold no special ids. Byte-level vocabularies distinguish a word at the start of a line from one after a space. With
    them, a text that is not empty gets one leading space, `prefix`, so that a span from the middle of a document looks
    like any other.
    """

    def __init__(
        self,
        backend: Tokenizer,  # the tokenizer; its settings are changed, so it must not be shared
        # library that applies it; only `tokenizers`, unless `choose_engine` found that the ids are the same.
        engine: EngineName = "tokenizers",
        parsed: dict[str, Any] | None = None,  # result of `parse` for the tokenizer, if the caller has it
    ) -> None:
        parsed = parse(backend) if parsed is None else parsed
        self._hidden = spelled_specials(backend, parsed)
        if self._hidden:
            backend = _without_pieces(parsed, self._hidden)
        self._backend = backend
        backend.encode_special_tokens = True
        backend.no_truncation()  # a tokenizer.json can bring it, and padding
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
            for (index, _), ids in zip(batch, self._encode([piece for _, piece in batch]), strict=True):
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
    texts = [f"{content} a {content}a{content}" for content in specials]  # alone, after a space and within a word
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
    """The pattern of spaces before which a cut changes no id of a text; None if no cut is certain to change none."""
    if any(token["rstrip"] or " " in token["content"] for token in parsed["added_tokens"]):
        return None
    before = parsed["pre_tokenizer"] or {}
    if before.get("type") == "ByteLevel":
        # GPT-2's pattern never matches across a space between two words, except that a match may start with it.
        return _CUT if before["use_regex"] and parsed["normalizer"] is None else None
    # SentencePiece (XLM-R): each word is tokenized alone, with the sign that replaced the space before it. Normalisers
    # can turn other characters into spaces, so the space must be between letters or digits.
    normalizer = parsed["normalizer"] or {}
    steps = [step["type"] for step in normalizer.get("normalizers", [normalizer]) if step]
    splitters = [part for part in before.get("pretokenizers", [before]) if part.get("type") != "WhitespaceSplit"]
    facts = [(part.get("type"), part.get("split"), part.get("prepend_scheme")) for part in splitters]
    by_word = {"Precompiled", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Replace"}
    return _WORDS_CUT if facts == [("Metaspace", True, "always")] and by_word.issuperset(steps) else None


def _types(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    """Types of a pre-tokenizer and of its parts."""
    if pre_tokenizer is None:
        return []
    return [pre_tokenizer["type"], *(name for part in pre_tokenizer.get("pretokenizers", []) for name in _types(part))]


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


_CHARACTERS_AT_ONCE = 200_000
_SPACES_END = 0x3100  # all whitespace characters are below this code point; Unicode adds none
_DIFFICULT = (
    *("", "\0", " ", "   ", " \n", "\n\n", "a ", " a", "_a_b__c-d--e...f!!!?!g@h#i$%^&*()", "\U0010ffff\ufffd\ufffe"),
    "it's we'll they've I'M 'tis 's'S ''s '' ' d'd 'll've \u2019s",
    "don't\n't\t'm 1'st 2'2 a'1 !'!s",
    "a  b   c\n\nd \n e\t\tf \r\n g\xa0\xa0h \xa0 i\u3000j \u2028 k\x85l\x1cm \x1f n",
    "3.14159 1,000,000 0x1F ½ ²³ ٣٤٥ ४५६ 〇一二三 Ⅷ 1a2b3c",
    "naïve café e\u0301\u0301 A\u030a \u1e9b\u0323 ﬁ ﷺ Ａｂｃ ǅ \u200b\u200d\ufeff\u00ad\u2060",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fdx",
    "東京都は日本の首都です。한국어 ภาษาไทย עולם مرحبا بالعالم \u202eabc\u202c",
)
_SURROGATES = range(0xD800, 0xE000)  # no text in UTF-8 has them


# Versions of tiktoken and tokenizers whose character tables are known to agree (checked by a test).
_AGREEING = {("0.14.0", "0.23.3")}


def choose_engine(
    folder: Path,  # folder with `tokenizer.json`
    setting: EngineSetting,  # `tokenizer.engine` of the configuration
    sample: Iterable[str] = (),  # texts of the corpus, as they will be encoded
) -> tuple[EngineName, str]:
    """The engine for the tokenizer of a folder written by `save_pretrained`, and the reason for it.

    tiktoken (byte-level BPE) is chosen if nothing in the tokenizer forbids it, both libraries classify letters, numbers
    and whitespace of Unicode alike, and all ids of difficult texts and of the sample are the same. The table of words
    (WordPiece) is chosen if nothing forbids it and those ids are the same. Takes about two seconds, plus one for each
    2 MiB of sample.
    """
    if setting == "tokenizers":
        return "tokenizers", "tokenizer.engine = 'tokenizers'"
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parsed = parse(backend)
    name: EngineName = "wordpiece" if parsed["model"]["type"] == "WordPiece" else "tiktoken"
    name = name if setting == "auto" else setting
    reason = wordpiece_obstacle(parsed) if name == "wordpiece" else bytelevel_obstacle(backend, parsed)
    if reason is None and name == "tiktoken" and (version("tiktoken"), version("tokenizers")) not in _AGREEING:
        reason = disagreement_of_patterns()
    if reason is None:
        # Two backends, because each batch tokenizer changes the settings of its backend.
        fast = BatchTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), name, parsed)
        reference = BatchTokenizer(backend, parsed=parsed)
        reason = disagreement(reference, fast, difficult_texts(backend)) or disagreement(reference, fast, sample)
    if reason is None:
        return name, "gives the ids of `tokenizers` on all tested texts"
    if setting != "auto":
        problem = f"tokenizer.engine = {setting!r} cannot replace this tokenizer: {reason}; set it to auto"
        raise ConfigError("tokenizer", [problem])
    return "tokenizers", f"{name} cannot replace this tokenizer: {reason}"


def disagreement(reference: BatchTokenizer, fast: BatchTokenizer, texts: Iterable[str]) -> str | None:
    """Describes the first text whose ids differ; None if all ids are equal."""
    for batch in batches(texts, len, _CHARACTERS_AT_ONCE):
        for text, expected, actual in zip(batch, reference.encode(batch), fast.encode(batch), strict=True):
            if not np.array_equal(expected, actual):
                shared = min(len(expected), len(actual))
                # False at the end, because one list of ids may begin with the other.
                first = int(np.argmin(np.append(expected[:shared] == actual[:shared], False)))
                return f"ids differ from token {first} of a text that begins {text[:60]!r}"
    return None


def difficult_texts(backend: Tokenizer) -> Iterator[str]:
    """Texts in which tokenizers are most likely to differ, the same every time."""
    specials = [token.content for token in backend.get_added_tokens_decoder().values()]
    yield from specials
    yield "".join(f"a{special}b {special} " for special in specials)
    yield from _DIFFICULT
    yield "".join(map(chr, range(256)))
    yield "".join(chr(code) + " " for code in range(0x20, 0x3000, 3))
    for run in ("a", "!", "=", "7", " ", "\n", "ab", "é", "東", "😀", " a", "'s"):
        yield from (run * length for length in (3, 100, 5000))
    yield from _drawn("abcxyzETAOIN  \n\t'\".,0129-_éßçжДم東한😀\u0301\u200d\xa0", 1000, 30)
    yield from _drawn("etaoinshrdlu", 1, 20_000)  # one word


def _drawn(alphabet: str, count: int, length: int) -> Iterator[str]:
    """Texts of random characters of an alphabet, the same every time."""
    numbers = np.arange(count, dtype=np.uint64)
    for row in seeding.words(0, "difficult texts", numbers, np.zeros_like(numbers), length):
        yield "".join(alphabet[drawn % len(alphabet)] for drawn in row.tolist())


@cache
def disagreement_of_patterns() -> str | None:
    """Names characters that the installed libraries classify differently (letter, number, whitespace or other).

    Their tables come from different versions of Unicode. The test vocabulary has a token for "a" followed by each byte,
    and for each byte followed by "1" or "!". In "aX1" the tokens then show in which word a library puts X.
    """
    letters = byte_letters()
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges = list(dict.fromkeys([*product(["a"], letters), *product(letters, ["1", "!"])]))  # a1 and a! occur in both
    vocab |= {first + second: index for index, (first, second) in enumerate(merges, start=len(vocab))}
    backends = [Tokenizer(models.BPE(vocab=vocab, merges=merges)) for _ in range(2)]
    for backend in backends:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference, fast = BatchTokenizer(backends[0]), BatchTokenizer(backends[1], "tiktoken")
    # Planes from 2 on are uniform or sparsely assigned, so that every 64th character is enough.
    codes = chain(range(0x20000), range(0x20000, 0x110000, 64))
    texts = [f"a{chr(code)}1" for code in codes if code not in _SURROGATES]
    texts += [f"a{chr(code)}!" for code in range(_SPACES_END)]
    for start in range(0, len(texts), 256):
        group = texts[start : start + 256]
        if disagreement(reference, fast, ["".join(group)]):
            odd = [text for text in group if disagreement(reference, fast, [text])]
            names = ", ".join(f"U+{ord(text[1]):04X}" for text in odd[:5])
            return f"the libraries classify {names} differently"
    return None
