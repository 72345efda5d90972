"""tiktoken in the place of `tokenizers`: the same ids on everything, and refused where it would give others."""

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

from declutr.common.errors import ConfigError
from declutr.pipeline.tokenizer import bytelevel, engine
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer
from declutr.pipeline.tokenizer.bytelevel import obstacle, parse
from declutr.pipeline.tokenizer.engine import choose_engine, difficult_texts, disagreement
from declutr.pipeline.tokenizer.tokenization import load_tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    made = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(made))
    return made


@pytest.fixture(scope="module")
def encoders(folder):
    return BatchTokenizer.load(folder), BatchTokenizer.load(folder, "tiktoken")


def test_our_own_tokenizer_is_tiktokens(folder):
    assert choose_engine(folder, "auto", ["some text " * 100]).engine == "tiktoken"
    assert choose_engine(folder, "tiktoken").engine == "tiktoken"
    assert choose_engine(folder, "tokenizers").engine == "tokenizers"


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


def test_long_texts_are_cut_where_whitespace_is_single(encoders, monkeypatch):
    texts = ["one  two \n three\n\n four it's " * 50, " \n a" * 100]
    expected = encoders[0].encode(texts)
    monkeypatch.setattr("declutr.pipeline.tokenizer.batch_tokenizer._PIECE_CHARACTERS", 7)
    for encoder in encoders:
        for ids, right in zip(encoder.encode(texts), expected, strict=True):
            np.testing.assert_array_equal(ids, right)


def changed(folder, tmp_path, change):
    """The tokenizer with something about it changed."""
    parsed = json.loads((folder / "tokenizer.json").read_text())
    change(parsed)
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    return tmp_path


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
    ("change", "reason"),
    [
        (merge_twice, ("two of", "merges")),
        (merge_out_of_reach, ("'qxz'", "several tokens")),
        (lambda parsed: parsed.update(normalizer={"type": "Lowercase"}), ("normalises", "Lowercase")),
        (lambda parsed: parsed["pre_tokenizer"].update(use_regex=False), ("BPE", "bytes")),
        (lambda parsed: parsed["model"].update(dropout=0.1), "dropout = 0.1"),
        (lambda parsed: parsed["model"].update(ignore_merges=True), "ignore_merges = True"),
        (lambda parsed: parsed["added_tokens"][0].update(special=False), ("added tokens", "not special")),
    ],
)
def test_a_tokenizer_that_tiktoken_cannot_be_is_left_to_tokenizers(folder, tmp_path, change, reason):
    other = changed(folder, tmp_path, change)
    choice = choose_engine(other, "auto")
    assert choice.engine == "tokenizers"
    with pytest.raises(ConfigError, match=all_of("tokenizer.engine = 'tiktoken'", "auto", reason)):
        choose_engine(other, "tiktoken")


def test_ranks_and_pairs_do_differ_where_a_token_is_out_of_reach(folder, tmp_path):
    """What `obstacle` refuses is real: without it the ids would differ."""
    other = changed(folder, tmp_path, merge_out_of_reach)
    found = disagreement(BatchTokenizer.load(other), BatchTokenizer.load(other, "tiktoken"), ["all equal", "a qxz"])
    says(found, "'a qxz'")


def test_the_installed_tables_of_unicode_agree():
    assert engine.disagreement_of_patterns() is None


def test_another_table_of_unicode_is_seen(folder, monkeypatch):
    for name in ("_SINGLE_SPACES", "_ANY_SPACES"):
        monkeypatch.setattr(bytelevel, name, getattr(bytelevel, name).replace(r"\p{N}", r"\p{Nd}"))
    monkeypatch.setattr(engine, "_AGREEING", set())
    engine.disagreement_of_patterns.cache_clear()
    try:
        choice = choose_engine(folder, "auto")
    finally:
        engine.disagreement_of_patterns.cache_clear()
    assert choice.engine == "tokenizers"
    assert "U+00B2" in choice.reason


def test_a_sample_that_differs_decides(folder, monkeypatch):
    """A fault that no other check can see: one id of the table is wrong."""
    build = bytelevel.ByteLevelBPE.__init__

    def faulty(self, parsed):
        build(self, parsed)
        self._ids[-1] = 5

    last = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"][-1]
    monkeypatch.setattr(bytelevel.ByteLevelBPE, "__init__", faulty)
    choice = choose_engine(folder, "auto", ["".join(last).replace("Ġ", " ")])
    assert choice.engine == "tokenizers"
    says(choice.reason, "ids differ")


def test_other_kinds_of_tokenizer_stay_with_tokenizers(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("[UNK]", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    choice = choose_engine(tmp_path, "auto", ["b a"])
    assert choice.engine == "tokenizers"
    assert "WordLevel" in choice.reason
    assert BatchTokenizer.load(tmp_path, choice.engine).encode(["b a", ""])[0].tolist() == [2, 1]


@pytest.mark.skipif(not REAL.is_dir(), reason="real vocabularies are not on this machine")
def test_engine_gives_the_ids_of_robertas_vocabulary(tmp_path):
    load_tokenizer(str(REAL / "tokenizers" / "roberta-base")).save_pretrained(str(tmp_path))
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert obstacle(backend, parse(backend)) is None
    reference, fast = BatchTokenizer.load(tmp_path), BatchTokenizer.load(tmp_path, "tiktoken")
    assert disagreement(reference, fast, difficult_texts(backend)) is None
    assert fast.encode(["Hello world"])[0].tolist() == [20920, 232]


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
