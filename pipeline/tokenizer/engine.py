"""Choice of the engine for a tokenizer: a faster one if tests show that it gives the ids of `tokenizers`."""

from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from declutr.common import seeding
from declutr.common.config import Strict
from declutr.common.errors import ConfigError
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, EngineName, batches, parse
from declutr.pipeline.tokenizer.fast_engines import byte_letters, bytelevel_obstacle, wordpiece_obstacle
from declutr.pipeline.tokenizer.tokenization import EngineSetting

_CHARACTERS_AT_ONCE = 200_000
# Ranges of CJK, Hangul, private use and sparsely assigned planes, in which only every 64th character is tested.
_SAMPLED = ((0x4E00, 0xA000), (0xAC00, 0xD7A4), (0xE000, 0xF900), (0x20000, 0x110000))
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
_SURROGATES = range(0xD800, 0xE000)


# Versions of tiktoken and tokenizers whose character tables are known to agree (checked by a test).
_AGREEING = {("0.14.0", "0.23.3")}


class EngineChoice(Strict):
    """The library that turns texts into ids, and the reason for it."""

    engine: EngineName
    reason: str


def choose_engine(folder: Path, setting: EngineSetting, sample: Iterable[str] = ()) -> EngineChoice:
    """The engine for the tokenizer of a folder written by `save_pretrained`.

    tiktoken (byte-level BPE) is chosen if nothing in the tokenizer forbids it, both libraries classify letters, numbers
    and whitespace of Unicode alike, and all ids of difficult texts and of the sample are the same. The table of words
    (WordPiece) is chosen if nothing forbids it and those ids are the same. Takes about two seconds, plus one for each
    2 MiB of sample.

    Args:
        folder: folder with `tokenizer.json`.
        setting: `tokenizer.engine` of the configuration.
        sample: texts of the corpus, as they will be encoded.

    Raises:
        ConfigError: the configured engine cannot give the same ids.
    """
    if setting == "tokenizers":
        return EngineChoice(engine="tokenizers", reason="tokenizer.engine = 'tokenizers'")
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
        return EngineChoice(engine=name, reason="gives the ids of `tokenizers` on all tested texts")
    if setting != "auto":
        problem = f"tokenizer.engine = {setting!r} cannot replace this tokenizer: {reason}; set it to auto"
        raise ConfigError("tokenizer", [problem])
    return EngineChoice(engine="tokenizers", reason=f"{name} cannot replace this tokenizer: {reason}")


def disagreement(reference: BatchTokenizer, fast: BatchTokenizer, texts: Iterable[str]) -> str | None:
    """Describes the first text whose ids differ; None if all ids are equal."""
    for batch in batches(texts, len, _CHARACTERS_AT_ONCE):
        for text, expected, actual in zip(batch, reference.encode(batch), fast.encode(batch), strict=True):
            if not np.array_equal(expected, actual):
                shared = min(len(expected), len(actual))
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
    """Random texts."""
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
    merges = list(dict.fromkeys([*product(["a"], letters), *product(letters, ["1", "!"])]))
    vocab |= {first + second: index for index, (first, second) in enumerate(merges, start=len(vocab))}
    backends = [Tokenizer(models.BPE(vocab=vocab, merges=merges)) for _ in range(2)]
    for backend in backends:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference, fast = BatchTokenizer(backends[0]), BatchTokenizer(backends[1], "tiktoken")
    texts = [f"a{character}1" for character in _characters()]
    texts += [f"a{chr(code)}!" for code in range(_SPACES_END)]
    for start in range(0, len(texts), 256):
        group = texts[start : start + 256]
        if disagreement(reference, fast, ["".join(group)]):
            odd = [text for text in group if disagreement(reference, fast, [text])]
            names = ", ".join(f"U+{ord(text[1]):04X}" for text in odd[:5])
            return f"the libraries classify {names} differently"
    return None


def _characters() -> list[str]:
    """The characters to compare: planes 0 and 1 of Unicode, with samples of uniform or rare ranges."""
    sampled = list(chain.from_iterable(range(first, end, 64) for first, end in _SAMPLED))
    uniform = set(chain.from_iterable(range(first, end) for first, end in _SAMPLED))
    whole = [code for code in range(0x20000) if code not in uniform and code not in _SURROGATES]
    return [chr(code) for code in whole + sampled]
