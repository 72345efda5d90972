"""The rules that look at characters, words and lines, each just inside and just outside of its limit."""

import os
import sys
import unicodedata
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from processes import run_python

from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig, normalise, problems
from declutr.pipeline.filters.rules import Boilerplate, C4Rules, GopherQuality, GopherRepetition, repetition_drop
from declutr.pipeline.filters.words import folded_words, hash_folded, hash_words

OFF = {"gopher": dict.fromkeys(GopherQuality.model_fields), "repetition": dict.fromkeys(GopherRepetition.model_fields)}
OFF["c4"] = dict.fromkeys(C4Rules.model_fields, False) | dict.fromkeys(("min_line_words", "min_sentences", "bad_words"))
NEVER = (1.0,) * 6
LINES = "\n".join(f"line {number}" for number in range(7))


def choose(section, rules, text):
    return DocumentFilter(FiltersConfig(**{section: OFF[section] | rules}, normalise_whitespace=False)).apply(text)


def numbered(count, start=0):
    return " ".join(f"w{number:03d}" for number in range(start, start + count))


@pytest.mark.parametrize(
    ("section", "rule", "inside", "outside", "reason"),
    [
        ("gopher", {"min_words": 50}, "word " * 50, "word " * 49, "gopher_word_count"),
        ("gopher", {"max_words": 100_000}, "word " * 100_000, "word " * 100_001, "gopher_word_count"),
        ("gopher", {"min_mean_word_characters": 3}, "ab abcd", "ab abc", "gopher_word_length"),
        ("gopher", {"max_mean_word_characters": 10}, "a" * 10, "a" * 10 + " " + "b" * 11, "gopher_word_length"),
        ("gopher", {"max_symbols_per_word": 0.1}, "# " + "word " * 9, "## " + "word " * 9, "gopher_symbols"),
        ("gopher", {"max_symbols_per_word": 0.1}, "so... " + "word " * 9, "so... so… " + "word " * 9, "gopher_symbols"),
        ("gopher", {"max_bullet_lines": 0.9}, "* a\n" * 9 + "b", "- a\n" * 10 + "b", "gopher_bullets"),
        ("gopher", {"max_bullet_lines": 0.9}, "• a\n\n\n" * 9 + "b", "  • a\n" * 19 + "b", "gopher_bullets"),
        ("gopher", {"max_ellipsis_lines": 0.3}, "a...\n" * 3 + "b\n" * 7, "a… \n" * 4 + "b\n" * 6, "gopher_ellipses"),
        ("gopher", {"min_words_with_letter": 0.8}, "a ü 字 4x 12", "a b c 12 -", "gopher_letters"),
        ("gopher", {"min_stop_words": 2}, "The cat and dog", "the cat, the dog, Anderson", "gopher_stop_words"),
        ("gopher", {"min_stop_words": 2}, "that\nbe", "that bee", "gopher_stop_words"),
        ("c4", {"lorem_ipsum": True}, "Lorem and ipsum.", "Here: Lorem Ipsum dolor.", "c4_lorem_ipsum"),
        ("c4", {"curly_bracket": True}, "a }", "a {", "c4_curly_bracket"),
        ("c4", {"min_sentences": 3}, 'One. "Two!" Three?', "One 1.5 x. Two e.g., hm!", "c4_sentences"),
        ("c4", {"min_line_words": 5}, "one two three four five", "one\ntwo", "c4_no_lines"),
    ],
)
def test_documents_just_outside_of_a_limit_are_dropped(section, rule, inside, outside, reason):
    assert choose(section, rule, inside).reason is None
    assert choose(section, rule, outside).reason == reason


@pytest.mark.parametrize(
    ("rule", "limit", "text", "at_limit", "above", "reason"),
    [
        # 3 of 10, 4 of 11 lines stood before
        ("max_duplicate_lines", 0.3, LINES + "{}", "\nline 1" * 3, "\nline 1" * 4, "lines"),
        ("max_duplicate_paragraphs", 0.3, LINES.replace("\n", "\n\n") + "{}", "\n \nline 1" * 3, "\n \nline 1" * 4,
         "paragraphs"),
        # 20 of 100, 20 of 99 characters
        ("max_duplicate_line_characters", 0.2, f"{'a' * 20}\n{{}}\n{'a' * 20}", "b" * 60, "b" * 59, "line_characters"),
        ("max_duplicate_paragraph_characters", 0.2, f"{'a' * 20}\n\n{{}}\n\n{'a' * 20}", "b" * 60, "b" * 59,
         "paragraph_characters"),
        # two 2-grams of 8 characters: 16 of 80, of 76
        ("max_top_ngram", (0.2, 1, 1), "w900 w901 x w900 w901 yyy {}", numbered(15), numbered(14), "2gram"),
        ("max_top_ngram", (1, 1, 0.16), f"{numbered(4, 900)} x {numbered(4, 900)} yyy {{}}", numbered(41), numbered(40),
         "4gram"),
        # ten words twice are 20 of 200, of 199 words of four characters
        ("max_duplicate_ngram", (*NEVER[:5], 0.1), f"{numbered(10, 900)} {{}} {numbered(10, 900)}", numbered(180),
         numbered(179), "10gram"),
        ("max_duplicate_ngram", (*NEVER[:5], 0.0), f"{{0}} {numbered(180)} {{0}}", numbered(9, 900),
         numbered(10, 900), "10gram"),
    ],
)  # fmt: skip
def test_repetition_is_dropped_just_above_each_limit(rule, limit, text, at_limit, above, reason):
    assert choose("repetition", {rule: limit}, text.format(at_limit)).reason is None
    kind = "top" if "top" in rule else "duplicate"
    assert choose("repetition", {rule: limit}, text.format(above)).reason == f"gopher_{kind}_{reason}"


def test_the_defaults_are_the_published_thresholds_and_the_first_reason_wins():
    document_filter = DocumentFilter(FiltersConfig(gopher=GopherQuality()))
    prose = "That is the way to be with people who have a mind of their own. " * 5
    assert document_filter.apply(prose).reason is None
    choice = document_filter.apply("# # 1")
    assert (choice.reason, choice.detail) == ("gopher_word_count", "3 words")


def ngrams_of(words, n):
    return [tuple(words[place : place + n]) for place in range(len(words) - n + 1)]


def covered(words, n, chosen):
    """Share of the characters of the words that the chosen n-grams cover, by the definition."""
    places = [place for place, ngram in enumerate(ngrams_of(words, n)) if ngram in chosen]
    inside = {place + step for place in places for step in range(n)}
    return sum(len(words[place]) for place in inside) / sum(map(len, words))


def repetition(words, **limits):
    text = " ".join(words)
    return repetition_drop(text, hash_words(text), [text], GopherRepetition(**OFF["repetition"] | limits))


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), min_size=1, max_size=80), st.integers(5, 10))
def test_duplicate_ngrams_are_those_of_the_definition(words, n):
    share = covered(words, n, {ngram for ngram, count in Counter(ngrams_of(words, n)).items() if count > 1})
    for threshold in (share, max(0.0, share - 1e-9)):
        drop = repetition(words, max_duplicate_ngram=tuple(threshold if m == n else 1.0 for m in range(5, 11)))
        assert (drop is not None) == (share > threshold)


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), min_size=1, max_size=40), st.integers(2, 4))
def test_the_top_ngram_is_one_of_the_most_frequent(words, n):
    counts = Counter(ngrams_of(words, n))
    highest = max(counts.values(), default=0)
    shares = [covered(words, n, {ngram}) for ngram, count in counts.items() if count == highest > 1]
    drop = repetition(words, max_top_ngram=tuple(0.0 if m == n else 1.0 for m in (2, 3, 4)))
    assert (drop is not None) == bool(shares)
    assert drop is None or drop[1] in [f"{share:.3f} of the characters" for share in shares]


C4_LINES = [({"terminal_punctuation": True}, ['He said "yes"', "Is it?  "], ["What is this", "And so on..."])]
C4_LINES += [({"min_line_words": 5}, ["one two three four five"], ["one two three four "])]
C4_LINES += [({"javascript": True}, ["Please enable Java."], ["Please enable JavaScript."])]
C4_LINES += [({"policies": True}, ["See our policy."], ["See our Privacy Policy."])]


@pytest.mark.parametrize(("rule", "kept", "removed"), C4_LINES)
def test_c4_lines_are_kept_by_the_published_rules(rule, kept, removed):
    lines = ["This is another line of text.", *kept]
    text = "".join(f"{line}\n" for line in (*removed[:1], *lines, *removed[1:]))
    assert choose("c4", rule, text).text == "\n".join(line.strip() for line in lines)
    text = choose("c4", {"citations": True}, "It is so.[1][edit] And [2020] [citation needed] a[i].").text
    assert text == "It is so. And [2020]  a[i].", "citations are marks"


def test_bad_words_are_whole_words_and_phrases_of_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("Gadzooks\nod's bodkins\n\n", encoding="utf-8")
    rule = {"bad_words": str(path)}
    assert choose("c4", rule, "gadzooksy").reason is None
    assert choose("c4", rule, "A cod's bodkins").reason is None
    assert choose("c4", rule, "So GADZOOKS!").detail == "gadzooks"
    assert choose("c4", rule, "By OD'S \n bodkins!").reason == "c4_bad_words"
    path.write_text("zounds\n")
    os.utime(path, ns=(0, 1))
    assert choose("c4", rule, "So GADZOOKS!").reason is None, "the file has changed"
    assert choose("c4", rule, "Zounds!").reason == "c4_bad_words"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, reason in (("none", "No such file"), ("empty", "holds no words"), ("latin", "not UTF-8")):
        says(*problems(FiltersConfig(c4=C4Rules(bad_words=str(tmp_path / name)))), "filters.c4.bad_words", reason)
    (problem,) = problems(FiltersConfig(c4=C4Rules(bad_words="$UNKNOWN_HERE/words")))
    assert problem.startswith("filters.c4.bad_words: ")


REMOVED = {
    "cookies": ["This website uses cookies to improve your experience.", "Accept all cookies", "Cookie settings"],
    "legal": ["© 2019 Example Ltd. All rights reserved.", "Terms of Service", "Privacy Policy", "Copyright 2004 A. B."],
    "navigation": ["Skip to content", "Back to top", "Read more", "Home | News | Sport | Weather", "Sign in", "Next"],
    "sharing": ["Share on Facebook", "Tweet this", "Share this article via email", "Follow us on Twitter"],
    "counters": ["3 likes", "1,204 comments", "2.5k shares", "Page 2 of 10", "12:30 | 45"],
}
KEPT = ["Introduction", "a | b", "Copyright law is older than the printing press."]
KEPT += ["The committee read the privacy policy and found it wanting in several respects."]
KEPT += ["She baked cookies and accepted all of them.", "Home is where the heart is, said the man."]
KEPT += ["Search parties were sent out at once.", "Share prices fell on Monday."]
KEPT += ["We counted 3 likes and 4 dislikes among the answers of that year."]
KEPT += ["We use cookies " + "because the article says so, and it goes on about them for a long while " * 3]


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in REMOVED.items() for line in lines])
def test_a_line_of_a_kind_is_removed_by_its_kind_and_by_no_other(kind, line):
    text = f"A real sentence.\n  {line}\n\nAnother one."
    for other in REMOVED:
        config = FiltersConfig(boilerplate=Boilerplate(kinds=[other]), normalise_whitespace=False)
        result = DocumentFilter(config).apply(text).text
        assert result == ("A real sentence.\n\nAnother one." if kind == other else text)


def test_boilerplate_filter_keeps_text_and_a_document_of_nothing_else_is_dropped_and_shown_whole():
    document_filter = DocumentFilter(FiltersConfig(boilerplate=Boilerplate(), normalise_whitespace=False))
    assert [document_filter.apply(line).text for line in KEPT] == KEPT
    document_filter = DocumentFilter(FiltersConfig(boilerplate=Boilerplate()))
    choice = document_filter.apply("Skip to content\n\n3 likes\n")
    assert (choice.reason, choice.text) == ("only_boilerplate", "Skip to content 3 likes")
    assert document_filter.apply("Skip to content\nA text.").text == "A text."


SPACED = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000ab\x00é\u200b\U0001f600"


@given(st.text() | st.text(SPACED, max_size=60), st.integers(65_470, 65_540), st.sampled_from("a\n"))
def test_whitespace_equals_the_simple_definition_also_of_a_cut_text(text, length, before):
    for whole in (text, before * length + text + "b"):  # cut after 65,536 characters
        assert normalise(whole) == " ".join(whole.split())


def test_whitespace_of_several_pieces_and_every_whitespace_character():
    text = "  word\n\n" * 400_000 + "a" * 2_000_000 + "\u3000 end "
    assert normalise(text) == " ".join(text.split())
    whitespace = [chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace()]
    assert normalise("a" + "b".join(whitespace) + "a") == "a " + " ".join("b" * (len(whitespace) - 1)) + " a"


ANY = st.text(alphabet=st.characters(exclude_categories=()), max_size=200)  # lone surrogates, too


@given(ANY)
def test_words_are_those_of_split_and_folding_is_lower_case_without_marks(text):
    words = hash_words(text)
    assert words.lengths.tolist() == [len(word) for word in text.split()]
    assert words.with_letter.tolist() == [any(c.isalpha() or ord(c) >= 0x1FFFF for c in w) for w in text.split()]
    marked = [c for c in text.lower() if unicodedata.category(c)[0] not in "PS" or c.isspace()]
    assert (folded_words(text), len(hash_folded(text))) == ("".join(marked).split(), len(folded_words(text)))
    assert hash_folded(" ".join(folded_words(text))).tolist() == hash_folded(text).tolist()


@given(st.lists(ANY, max_size=20))
def test_equal_words_have_equal_hashes_wherever_they_stand_and_others_do_not(parts):
    text = " ".join(parts)
    hashes = hash_words(text).hashes.tolist()
    assert len({*zip(text.split(), hashes, strict=True)}) == len(set(text.split())) == len(set(hashes))


def test_long_texts_are_cut_without_changing_words_whose_hashes_differ_and_are_the_same_in_every_process():
    piece = 2**15
    text = "Zürich is a city. " * (piece // 5)
    assert (len(set(hash_words(text).hashes.tolist())), len(hash_folded(text))) == (4, 4 * (piece // 5))
    assert len(hash_words("a" * (3 * piece))) == 3
    assert len(hash_folded("İ" * piece)) == 1  # lower case is twice as long
    assert len(hash_folded("\u0390" * (2 * piece))) == 2
    assert len(np.unique(hash_words(" ".join(map(str, range(200_000)))).hashes)) == 200_000
    code = "from declutr.pipeline.filters.words import hash_words; print(hash_words('the same é').hashes.tolist())"
    assert run_python("-c", code).stdout.strip() == str(hash_words("the same é").hashes.tolist())
