"""Shingles and signatures against their definitions."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import says

from declutr.pipeline.duplicates import shingles as sketching
from declutr.pipeline.duplicates.config import DuplicatesConfig, NearConfig, problems
from declutr.pipeline.duplicates.shingles import Signer, band_keys, shingles, word_hashes

ROOT = Path(__file__).resolve().parents[3]


def words_of(text):
    """Words as the docstring of shingles.py defines them, for letters of scripts with spaces."""
    return "".join(c.lower()[0] if c.isalnum() else " " for c in text).split()


@given(st.text(alphabet="aAbBéÉ1 .,\n-ß’", max_size=60), st.integers(1, 4))
@settings(deadline=None)
def test_equal_shingles_are_equal_runs_of_words(text, size):
    words = words_of(text)
    hashes = shingles(text, size).tolist()
    if not words:
        assert len(hashes) == 1
        return
    size = min(size, len(words))
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    assert len(hashes) == len(grams)
    assert len(set(hashes)) == len(set(grams)) == len(set(zip(grams, hashes, strict=True)))


def test_case_and_punctuation_do_not_count_and_scripts_without_spaces_are_read_by_character():
    assert np.array_equal(shingles("The quick, brown fox!", 2), shingles("the  QUICK -- brown\nfox", 2))
    assert len(word_hashes("今日は 12月 です")) == 3 + 2 + 2  # Han and kana alone, "12" a word
    assert len(word_hashes("नमस्ते दुनिया")) == 2  # combining vowels belong to their word
    assert len(word_hashes("\ud800 a")) == 1  # half of a pair, as JSON may hold
    assert not np.array_equal(shingles("a b", 5), shingles("b a", 5))


def test_a_long_text_is_hashed_in_pieces_without_a_seam():
    for separator in (" ", "é "):
        words = [f"word{number}{separator.strip()}" for number in range(30_000)]
        whole = word_hashes(" ".join(words))
        assert np.array_equal(whole, np.concatenate([word_hashes(word) for word in words]))
    assert len(word_hashes("x" * 100_000)) == 4  # a run longer than a piece is cut, nothing else


def test_texts_without_words_are_alike_only_when_equal():
    signer = Signer(NearConfig())
    signed = [signer.sign(text) for text in ("", "!!!", "???", "! ! !", "!!!")]
    assert [np.mean(signed[1] == other) for other in signed] == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("num_shingles", [1, 3, 40, 500, 20_000])
@pytest.mark.parametrize("similarity", [0.1, 0.5, 0.9])
def test_the_share_of_equal_slots_estimates_jaccard(num_shingles, similarity):
    rng = np.random.default_rng(num_shingles)
    signer = Signer(NearConfig())
    errors, expected = [], []
    for _ in range(60):
        union = rng.integers(0, 2**63, num_shingles, dtype=np.uint64)
        shared = rng.random(num_shingles) < similarity
        first = shared | (rng.random(num_shingles) < 0.5)
        second = shared | ~first
        if first.any() and second.any():
            jaccard = np.mean(first & second)
            errors.append(np.mean(signer.sketch(union[first]) == signer.sketch(union[second])) - jaccard)
            expected.append(jaccard * (1 - jaccard) / 125)
    assert abs(np.mean(errors)) < 4 * np.sqrt(np.mean(expected) / len(errors)) + 1e-9
    assert np.mean(np.square(errors)) < 1.8 * np.mean(expected) + 1e-9


def test_a_signature_is_of_a_set_and_the_same_in_every_process():
    signer = Signer(NearConfig())
    hashes = shingles("one two three four five six seven " * 3 + "eight", 3)
    assert np.array_equal(signer.sketch(hashes), signer.sketch(np.unique(hashes)[::-1]))
    code = (
        "from declutr.pipeline.duplicates.config import NearConfig\n"
        "from declutr.pipeline.duplicates.shingles import Signer\n"
        "print(Signer(NearConfig()).sign('Ein schöner Tag am See, und dann?').tolist())"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, check=True)
    here = signer.sign("Ein schöner Tag am See, und dann?")
    assert printed.stdout.decode().strip() == str(here.tolist())
    # What the first version gave: keys on disk from it must not silently come to mean something else.
    assert here[:4].tolist() == [3230642084, 3498748665, 3453156323, 3427288791]
    assert here[here < 3 << 30][:4].tolist() == [1284774109, 632393368, 2729227066, 2446047937]  # of the rounds


@pytest.mark.parametrize("num_shingles", [1, 50, 200, 400, 2000])
def test_rounds_taken_at_once_or_in_turn_make_no_difference(num_shingles, monkeypatch):
    hashes = np.random.default_rng(0).integers(0, 2**63, num_shingles, dtype=np.uint64)
    at_once = Signer(NearConfig()).sketch(hashes)
    monkeypatch.setattr(sketching, "_FEW", 0)
    assert np.array_equal(Signer(NearConfig()).sketch(hashes), at_once)


def test_bands_share_no_keys_and_depend_on_their_rows_alone():
    near = NearConfig(bands=3, rows=2)
    signed = np.array([[1, 2, 1, 2, 1, 2], [1, 2, 1, 3, 1, 2]], np.uint32)
    keys = band_keys(signed, near)
    assert len(set(keys[0].tolist())) == 3
    assert (keys[0] == keys[1]).tolist() == [True, False, True]


def test_settings_that_would_miss_most_pairs_are_a_problem():
    assert problems(DuplicatesConfig(near=NearConfig())) == []
    assert problems(DuplicatesConfig()) == []
    (problem,) = problems(DuplicatesConfig(near=NearConfig(bands=5, rows=25)))
    says(problem, "near.bands = 5", "near.rows = 25")
    assert not DuplicatesConfig(exact=False).enabled
    assert DuplicatesConfig(exact=False, near=NearConfig()).enabled
