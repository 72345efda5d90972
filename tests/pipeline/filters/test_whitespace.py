import sys

from hypothesis import given
from hypothesis import strategies as st

from declutr.pipeline.filters.document_filter import normalise

SPACED = st.text(
    alphabet=st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000ab\x00é\u200b\U0001f600"), max_size=60
)


@given(st.one_of(st.text(), SPACED))
def test_whitespace_equals_the_simple_definition(text):
    assert normalise(text) == " ".join(text.split())


@given(SPACED, st.integers(1, 7))
def test_whitespace_of_a_cut_text_equals_the_simple_definition(text, piece):
    assert normalise(text, piece) == " ".join(text.split())


def test_whitespace_of_a_text_of_several_pieces_equals_the_simple_definition():
    text = "  word\n\n" * 400_000 + "a" * 2_000_000 + "\u3000 end "
    assert normalise(text) == " ".join(text.split())


def test_every_whitespace_character_is_known():
    whitespace = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert normalise("a" + "b".join(whitespace) + "a") == "a " + " ".join("b" * (len(whitespace) - 1)) + " a"
