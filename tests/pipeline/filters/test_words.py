import subprocess
import sys
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from declutr.pipeline.filters.words import folded_words, hash_folded, hash_words

ANY = st.text(alphabet=st.characters(exclude_categories=()), max_size=200)  # lone surrogates, too


@given(ANY)
def test_words_are_those_of_split(text):
    words = hash_words(text)
    assert words.lengths.tolist() == [len(word) for word in text.split()]
    assert words.with_letter.tolist() == [any(c.isalpha() or ord(c) >= 0x1FFFF for c in w) for w in text.split()]


@given(st.lists(ANY, max_size=20))
def test_equal_words_have_equal_hashes_wherever_they_stand_and_others_do_not(parts):
    text = " ".join(parts)
    hashes = hash_words(text).hashes.tolist()
    assert len({*zip(text.split(), hashes, strict=True)}) == len(set(text.split())) == len(set(hashes))


@given(ANY)
def test_folding_is_lower_case_without_marks(text):
    marked = [c for c in text.lower() if unicodedata.category(c)[0] not in "PS" or c.isspace()]
    assert folded_words(text) == "".join(marked).split()
    assert len(hash_folded(text)) == len(folded_words(text))
    assert hash_folded(" ".join(folded_words(text))).tolist() == hash_folded(text).tolist()


def test_long_texts_and_words_without_end_are_cut_without_changing_the_other_words():
    piece = 2**15
    text = "Zürich is a city. " * (piece // 5)
    assert len(set(hash_words(text).hashes.tolist())) == 4
    assert len(hash_folded(text)) == 4 * (piece // 5)
    assert len(hash_words("a" * (3 * piece))) == 3
    assert len(hash_folded("İ" * piece)) == 1  # lower case is twice as long
    assert len(hash_folded("\u0390" * (2 * piece))) == 2


def test_different_words_have_different_hashes():
    text = " ".join(map(str, range(200_000)))
    assert len(np.unique(hash_words(text).hashes)) == 200_000


def test_hashes_are_the_same_in_every_process():
    code = "from declutr.pipeline.filters.words import hash_words; print(hash_words('the same é').hashes.tolist())"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == str(hash_words("the same é").hashes.tolist())
