"""tiktoken and the table of pieces in the place of `tokenizers`: the same ids on everything, or refused."""

import gzip
import itertools
import json
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import all_of, says
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from vocabularies import SPECIALS, wordpiece_backend

from declutr.common.errors import ConfigError
from declutr.pipeline.tokenizer import batch_tokenizer, fast_engines
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer, choose_engine, difficult_texts, disagreement
from declutr.pipeline.tokenizer.tokenization import fingerprint, load_tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(made))
    return made


@pytest.fixture(scope="module")
def encoders(folder):
    return BatchTokenizer.load(folder), BatchTokenizer.load(folder, "tiktoken")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=200) | st.text(alphabet=" \n\t\xa0'aé1!s東", max_size=60))
def test_any_text_gets_the_same_ids(encoders, text):
    reference, fast = encoders
    assert disagreement(reference, fast, [text]) is None


def test_every_character_gets_the_same_ids(encoders):
    """Each code point of Unicode between letters, numbers, signs and spaces, with this vocabulary."""
    reference, fast = encoders
    codes = [code for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    lines = (
        "".join(f"a{c}b1{c}2 !{c}s {c}" for c in map(chr, codes[start : start + 500])) for start in range(0, 65536, 500)
    )
    assert disagreement(reference, fast, lines) is None


@pytest.mark.slow
def test_a_megabyte_without_a_boundary_takes_no_more_than_linear_time_and_the_same_ids(encoders):
    reference, fast = encoders
    texts = [letter * 300_000 for letter in ("a", "!", " ", "\n", "\u3000", "x \n")]
    for text, expected in zip(texts, reference.encode(texts), strict=True):
        np.testing.assert_array_equal(fast.encode([text])[0], expected)


def merge_twice(parsed):
    """abc as (a, bc) after (ab, c): tokens cannot tell which pair was meant."""
    vocab = parsed["model"]["vocab"]
    vocab |= {token: len(vocab) + index for index, token in enumerate(["qx", "xz", "qxz"])}
    parsed["model"]["merges"] += [["q", "x"], ["x", "z"], ["qx", "z"], ["q", "xz"]]


def merge_out_of_reach(parsed):
    """Where qxz stands, x and z merge first: by pairs qxz is never made, by ranks it would be."""
    vocab = parsed["model"]["vocab"]
    vocab |= {token: len(vocab) + index for index, token in enumerate(["xz", "qx", "qxz"])}
    parsed["model"]["merges"] += [["x", "z"], ["q", "x"], ["qx", "z"]]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("tiktoken", merge_twice, ("two of", "merges")),
        ("tiktoken", merge_out_of_reach, ("'qxz'", "several tokens")),
        ("tiktoken", lambda parsed: parsed.update(normalizer={"type": "Lowercase"}), ("normalises", "Lowercase")),
        ("tiktoken", lambda parsed: parsed["pre_tokenizer"].update(use_regex=False), ("BPE", "bytes")),
        ("tiktoken", lambda parsed: parsed["model"].update(dropout=0.1), "dropout = 0.1"),
        ("tiktoken", lambda parsed: parsed["model"].update(ignore_merges=True), "ignore_merges = True"),
        ("tiktoken", lambda parsed: parsed["added_tokens"][0].update(special=False), ("added tokens", "not special")),
        ("wordpiece", lambda parsed: parsed.update(normalizer={"type": "NFC"}), ("NFC", "BertPreTokenizer")),
        ("wordpiece", lambda parsed: parsed.update(pre_tokenizer={"type": "Whitespace"}), ("Whitespace", "WordPiece")),
        ("wordpiece", lambda parsed: parsed["added_tokens"][4].update(special=False), ("special", "'[MASK]'")),
    ],
)
def test_a_tokenizer_that_a_faster_engine_cannot_be_is_left_to_tokenizers(folder, tmp_path, name, change, reason):
    parsed = json.loads((folder / "tokenizer.json").read_text() if name == "tiktoken" else build(**KINDS[0]).to_str())
    change(parsed)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert choose_engine(tmp_path, "auto")[0] == "tokenizers"
    with pytest.raises(ConfigError, match=all_of(f"tokenizer.engine = '{name}'", "auto", reason)):
        choose_engine(tmp_path, name)


def test_each_faster_engine_is_chosen_for_its_own_kind_alone(folder, tmp_path):
    build(**KINDS[0]).save(str(tmp_path / "tokenizer.json"))
    for name, place in (("tiktoken", folder), ("wordpiece", tmp_path)):
        assert choose_engine(place, "auto", ["some text " * 100])[0] == name
        assert [choose_engine(place, chosen)[0] for chosen in (name, "tokenizers")] == [name, "tokenizers"]
    with pytest.raises(ConfigError, match=all_of("tokenizer.engine = 'tiktoken'", "WordPiece")):
        choose_engine(tmp_path, "tiktoken")


def test_the_installed_tables_of_unicode_agree_and_another_is_seen(folder, monkeypatch):
    assert batch_tokenizer.disagreement_of_patterns() is None
    for name in ("_SINGLE_SPACES", "_ANY_SPACES"):
        monkeypatch.setattr(fast_engines, name, getattr(fast_engines, name).replace(r"\p{N}", r"\p{Nd}"))
    monkeypatch.setattr(batch_tokenizer, "_AGREEING", set())
    batch_tokenizer.disagreement_of_patterns.cache_clear()
    try:
        engine, reason = choose_engine(folder, "auto")
    finally:
        batch_tokenizer.disagreement_of_patterns.cache_clear()
    assert engine == "tokenizers"
    assert "U+00B2" in reason


def test_a_sample_that_differs_decides(folder, monkeypatch):
    """A fault that no other check can see: one id of the table is wrong."""
    build = fast_engines.ByteLevelBPE.__init__

    def faulty(self, parsed):
        build(self, parsed)
        self._ids[-1] = 5

    last = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"][-1]
    monkeypatch.setattr(fast_engines.ByteLevelBPE, "__init__", faulty)
    engine, reason = choose_engine(folder, "auto", ["".join(last).replace("Ġ", " ")])
    assert engine == "tokenizers"
    says(reason, "ids differ")


def test_other_kinds_of_tokenizer_stay_with_tokenizers(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("[UNK]", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    engine, reason = choose_engine(tmp_path, "auto", ["b a"])
    assert engine == "tokenizers"
    assert "WordLevel" in reason
    assert BatchTokenizer.load(tmp_path, engine).encode(["b a", ""])[0].tolist() == [2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("engine_name", ["tiktoken", "tokenizers"])
def test_memory_stays_flat_over_ever_new_words(encoders, engine_name):
    """A small version of the measurement in benchmarks/README.md: half a million words that no cache has seen."""
    encoder = encoders[engine_name == "tiktoken"]

    def encode(first, count):
        for start in range(first, first + count):
            encoder.encode(
                [
                    " ".join(
                        f"{number:x}q{number * 7919 % 100003}" for number in range(start * 20_000, (start + 1) * 20_000)
                    )
                ]
            )

    encode(0, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    encode(8, 24)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 12 * 2**20


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789éàüßçñøåİıſŉǆΣσςжщдйёאבגあいう"
LETTERS += "カガハバパ東京都한국어ไทยहिन्दी"
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~¡«»¿‐–—‘’“”…、。「」！？＄€™"
WORDS = ["playing", "players", "unaffable", "café", "naïve", "résumé", "word", "words", "wording", "straße"]
WORDS += ["e\u0301te\u0301", "Ångström", "2nd"]
HOSTILE = [
    *SPECIALS,
    "a[MASK]b [CLS][SEP] [UN K] [unused1] ##ing ## #",
    "a\x00b\ufffdc\x01d\x0be\x0cf\x1cg\x1fh\x7fi\x85j\x9fk\xadl\u200bm\u200cn\u200do\u2060p\ufeffq\ue000r\U0010ffffs",
    "a\tb\nc\rd\xa0e\u1680f\u2000g\u2003h\u2028i\u2029j\u202fk\u205fl\u3000m",
    "e\u0301 e \u0301 \u0301e e\u0301\u0323 e\u0323\u0301 \u2019\u0301a .\u0301 東\u0301京 \u0344 a\u0345",
    "İstanbul ISTANBUL ıſ ŉ Ǆ ΟΔΟΣ ΣΣ ß ẞ ﬁ ﬀ Ⅷ ① ㍿ ﷺ Å \u212b \u1e9b\u0323 각 \u1100\u1161\u11a8",
    "東京は日本の首都。人口は1400万人、面積は2,194km²。\uf900\ufa0e\U0002f800\U00020000\u3400",
    "😀👩‍👩‍👧🏳️‍🌈👍🏽 a😀b 🇩🇪 ❤️ x\ufe0fy",
    "עִבְרִית العَرَبِيَّة हिन्दी ไทย \u202eabc\u202c \u2066x\u2069",
    *(letter * length for letter in ("a", "é", "東", "😀", "!", " ", "\u0301", "ab ") for length in (9, 11, 101, 5000)),
    "a" * 100 + " " + "a" * 101 + " " + "é" * 100 + "e\u0301" * 101,
]
FLAGS = ("lowercase", "strip_accents", "clean_text", "handle_chinese_chars", "longest")
KINDS = [
    dict(zip(FLAGS, values, strict=True))
    for values in (
        (True, None, True, True, 100),  # bert-base-uncased
        (False, None, True, True, 100),  # bert-base-cased
        (True, False, True, False, 10),
        (False, True, False, True, 10),
        (True, True, False, False, 100),
        (False, False, False, False, 100),
    )
]
KINDS += [{"longest": 100}]


def build(**flags):
    """A small cased or uncased WordPiece."""
    texts = [" ".join(WORDS), " ".join(LETTERS), LETTERS, " ".join(SIGNS), *HOSTILE[:9]]
    return wordpiece_backend(texts * 3, 900, **flags)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: " ".join(f"{k}={v}" for k, v in kind.items()))
def pair(request):
    backend = build(**request.param)
    copy = Tokenizer.from_str(backend.to_str())
    return BatchTokenizer(backend), BatchTokenizer(copy, "wordpiece")


def test_difficult_and_hostile_texts_and_every_character_get_the_same_ids(pair):
    reference, fast = pair
    assert disagreement(reference, fast, difficult_texts(reference._backend)) is None
    assert disagreement(reference, fast, [*HOSTILE, "".join(HOSTILE), " ".join(HOSTILE)]) is None
    # Between letters, signs and accents, as they would be cut apart: the first planes of Unicode, at each step.
    reference, fast = pair
    codes = [*range(0x3400), *range(0x3400, 0xD800, 17), *range(0xE000, 0xF900, 61), *range(0xF900, 0x10000)]
    codes += range(0x10000, 0x30000, 23)
    lines = (
        "".join(f"a{c}b {c}\u0301e.{c}!\u0323{c}{c}" for c in map(chr, codes[start : start + 500]))
        for start in range(0, len(codes), 500)
    )
    assert disagreement(reference, fast, lines) is None


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(max_size=100)
    | st.text(alphabet=LETTERS + SIGNS + " \n\xa0\u0301\u0323\u200d\x00\x85東😀", max_size=100)
    | st.lists(st.sampled_from([*WORDS, *SPECIALS, " ", "\u0301", "’", "東", "\x00"]), max_size=30).map("".join)
)
def test_any_text_gets_the_same_ids_of_wordpiece(pair, text):
    assert disagreement(*pair, [text]) is None


def test_long_texts_are_cut_where_nothing_changes(pair, monkeypatch):
    reference, fast = pair
    texts = ["one  two \n three\n\n playing it's e\u0301 " * 20, "x" * 300, "  " * 50, ""]
    texts += ["東京は日本の首都。人口は一千四百万人" * 30, "e\u0301.\u0301東\u0301京 " * 30]
    expected = [ids.tolist() for ids in reference.encode(texts)]
    monkeypatch.setattr(fast_engines, "_CHARACTERS_AT_ONCE", 7)
    assert [ids.tolist() for ids in fast.encode(texts)] == expected


def test_the_table_is_bounded_and_right_when_it_begins_anew(monkeypatch):
    backend = build(**KINDS[0])
    reference, fast = BatchTokenizer(Tokenizer.from_str(backend.to_str())), BatchTokenizer(backend, "wordpiece")
    monkeypatch.setattr(fast_engines, "_MOST_PIECES", 50)
    texts = [" ".join(f"w{number}{letter}" for letter in LETTERS) for number in range(20)]
    assert disagreement(reference, fast, [*texts, "z" * 200, *texts]) is None
    assert len(fast._fast._pieces) <= 50
    assert max(map(len, fast._fast._pieces)) <= 48


def test_a_sample_that_differs_decides_on_wordpiece(tmp_path, monkeypatch):
    missing = fast_engines._Pieces.__missing__
    monkeypatch.setattr(fast_engines._Pieces, "__missing__", lambda self, p: missing(self, p) * (1 + (p == "qqzz")))
    build(**KINDS[0]).save(str(tmp_path / "tokenizer.json"))
    engine, reason = choose_engine(tmp_path, "auto", ["all equal", "a qqzz"])
    assert engine == "tokenizers"
    says(reason, "ids differ")


@pytest.mark.skipif(not REAL.is_dir(), reason="real vocabularies are not on this machine")
@pytest.mark.parametrize(
    ("name", "engine_name", "prefix", "ids"),
    [("roberta-base", "tiktoken", " ", [20920, 232]), ("bert-base-uncased", "wordpiece", "", [7592, 2088])],
)
def test_real_vocabularies_give_their_known_ids(tmp_path, name, engine_name, prefix, ids):
    tokenizer = load_tokenizer(str(REAL / "tokenizers" / name))
    tokenizer.save_pretrained(str(tmp_path))
    assert fingerprint(load_tokenizer(str(tmp_path))) == fingerprint(tokenizer)
    assert tokenizer(prefix + "Hello world", add_special_tokens=False)["input_ids"] == ids
    assert choose_engine(tmp_path, "auto", ["Hello world"])[0] == engine_name
    reference, fast = BatchTokenizer.load(tmp_path), BatchTokenizer.load(tmp_path, engine_name)
    assert [encoder.encode(["Hello world"])[0].tolist() for encoder in (reference, fast)] == [ids, ids]
    assert disagreement(reference, fast, [*difficult_texts(reference._backend), *HOSTILE]) is None
    for path in sorted((REAL / "corpus").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)["text"][:20_000] for line in itertools.islice(lines, 8)]
        assert disagreement(reference, fast, texts) is None
