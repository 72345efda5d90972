from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig
from declutr.pipeline.filters.gopher import GopherRepetition, repetition_drop
from declutr.pipeline.filters.words import hash_words

OFF = dict.fromkeys(GopherRepetition.model_fields)
NEVER = (1.0,) * 6


def reason_of(text, **rules):
    return DocumentFilter(FiltersConfig(repetition=GopherRepetition(**OFF | rules))).apply(text).reason


def numbered(count, start=0):
    return " ".join(f"w{number:03d}" for number in range(start, start + count))


LINES = "\n".join(f"line {number}" for number in range(7))


@pytest.mark.parametrize(
    ("rule", "inside", "outside", "reason"),
    [
        (  # 3 of 10, 4 of 11 lines stood before
            {"max_duplicate_lines": 0.3},
            LINES + "\nline 1" * 3,
            LINES + "\nline 1" * 4,
            "gopher_duplicate_lines",
        ),
        (
            {"max_duplicate_paragraphs": 0.3},
            LINES.replace("\n", "\n\n") + "\n \nline 1" * 3,
            LINES.replace("\n", "\n\n") + "\n \nline 1" * 4,
            "gopher_duplicate_paragraphs",
        ),
        (  # 20 of 100, 20 of 99 characters
            {"max_duplicate_line_characters": 0.2},
            "a" * 20 + "\n" + "b" * 60 + "\n" + "a" * 20,
            "a" * 20 + "\n" + "b" * 59 + "\n" + "a" * 20,
            "gopher_duplicate_line_characters",
        ),
        (
            {"max_duplicate_paragraph_characters": 0.2},
            "a" * 20 + "\n\n" + "b" * 60 + "\n\n" + "a" * 20,
            "a" * 20 + "\n\n" + "b" * 59 + "\n\n" + "a" * 20,
            "gopher_duplicate_paragraph_characters",
        ),
        (  # two 2-grams of 8 characters: 16 of 80, of 76
            {"max_top_ngram": (0.2, 1, 1)},
            "w900 w901 x w900 w901 yyy " + numbered(15),
            "w900 w901 x w900 w901 yyy " + numbered(14),
            "gopher_top_2gram",
        ),
        (
            {"max_top_ngram": (1, 1, 0.16)},
            f"{numbered(4, 900)} x {numbered(4, 900)} yyy {numbered(41)}",
            f"{numbered(4, 900)} x {numbered(4, 900)} yyy {numbered(40)}",
            "gopher_top_4gram",
        ),
        (  # ten words twice are 20 of 200, of 199 words of four characters
            {"max_duplicate_ngram": (*NEVER[:5], 0.1)},
            f"{numbered(10, 900)} {numbered(180)} {numbered(10, 900)}",
            f"{numbered(10, 900)} {numbered(179)} {numbered(10, 900)}",
            "gopher_duplicate_10gram",
        ),
        (
            {"max_duplicate_ngram": (*NEVER[:5], 0.0)},
            f"{numbered(9, 900)} {numbered(180)} {numbered(9, 900)}",
            f"{numbered(10, 900)} {numbered(180)} {numbered(10, 900)}",
            "gopher_duplicate_10gram",
        ),
    ],
)
def test_repetition_is_dropped_just_above_each_limit(rule, inside, outside, reason):
    assert reason_of(inside, **rule) is None
    assert reason_of(outside, **rule) == reason


def covered(words, n, wanted):
    """Characters of the words that the wanted n-grams cover, by the definition."""
    inside = set()
    for place in range(len(words) - n + 1):
        if tuple(words[place : place + n]) in wanted:
            inside.update(range(place, place + n))
    return sum(len(words[place]) for place in inside) / sum(map(len, words))


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), min_size=1, max_size=80), st.integers(5, 10))
def test_duplicate_ngrams_are_those_of_the_definition(words, n):
    counts = Counter(tuple(words[place : place + n]) for place in range(len(words) - n + 1))
    share = covered(words, n, {ngram for ngram, count in counts.items() if count > 1})
    text = " ".join(words)
    for threshold in (share, max(0.0, share - 1e-9)):
        limits = tuple(threshold if m == n else 1.0 for m in range(5, 11))
        drop = repetition_drop(
            text, hash_words(text), [text], GopherRepetition(**OFF | {"max_duplicate_ngram": limits})
        )
        assert (drop is not None) == (share > threshold)


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), min_size=1, max_size=40), st.integers(2, 4))
def test_the_top_ngram_is_one_of_the_most_frequent(words, n):
    counts = Counter(tuple(words[place : place + n]) for place in range(len(words) - n + 1))
    most = max(counts.values(), default=0)
    shares = [covered(words, n, {ngram}) for ngram, count in counts.items() if count == most > 1]
    text = " ".join(words)
    limits = tuple(0.0 if m == n else 1.0 for m in (2, 3, 4))
    drop = repetition_drop(text, hash_words(text), [text], GopherRepetition(**OFF | {"max_top_ngram": limits}))
    assert (drop is not None) == bool(shares)
    assert drop is None or drop[1] in [f"{share:.3f} of the characters" for share in shares]
