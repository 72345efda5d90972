import os

import pytest

from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig, problems
from declutr.pipeline.filters.lines import C4Rules

OFF = {
    name: None if name in ("min_line_words", "min_sentences", "bad_words") else False for name in C4Rules.model_fields
}


def choose(text, **rules):
    return DocumentFilter(FiltersConfig(c4=C4Rules(**OFF | rules), normalise_whitespace=False)).apply(text)


@pytest.mark.parametrize(
    ("rule", "line", "kept"),
    [
        ({"terminal_punctuation": True}, 'He said "yes"', True),
        ({"terminal_punctuation": True}, "Is it?  ", True),
        ({"terminal_punctuation": True}, "What is this", False),
        ({"terminal_punctuation": True}, "And so on...", False),
        ({"min_line_words": 5}, "one two three four five", True),
        ({"min_line_words": 5}, "one two three four ", False),
        ({"javascript": True}, "Please enable JavaScript.", False),
        ({"javascript": True}, "Please enable Java.", True),
        ({"policies": True}, "See our Privacy Policy.", False),
        ({"policies": True}, "See our policy.", True),
    ],
)
def test_c4_lines_are_kept_by_the_published_rules(rule, line, kept):
    other = "This is another line of text."
    assert choose(f"{other}\n{line}\n", **rule).text == (f"{other}\n{line.strip()}" if kept else other)


def test_citations_are_marks_not_text():
    assert choose("It is so.[1][edit] And [2020] [citation needed] a[i].", citations=True).text == (
        "It is so. And [2020]  a[i]."
    )


@pytest.mark.parametrize(
    ("rule", "inside", "outside", "reason"),
    [
        ({"lorem_ipsum": True}, "Lorem and ipsum.", "Here: Lorem Ipsum dolor.", "c4_lorem_ipsum"),
        ({"curly_bracket": True}, "a }", "a {", "c4_curly_bracket"),
        ({"min_sentences": 3}, 'One. "Two!" Three?', "One 1.5 x. Two e.g., hm!", "c4_sentences"),
        ({"min_line_words": 5}, "one two three four five", "one\ntwo", "c4_no_lines"),
    ],
)
def test_c4_pages_are_kept_by_the_published_rules(rule, inside, outside, reason):
    assert choose(inside, **rule).reason is None
    assert choose(outside, **rule).reason == reason


def test_bad_words_are_whole_words_and_phrases_of_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("Gadzooks\nod's bodkins\n\n", encoding="utf-8")
    assert choose("gadzooksy", bad_words=str(path)).reason is None
    assert choose("A cod's bodkins", bad_words=str(path)).reason is None
    assert choose("So GADZOOKS!", bad_words=str(path)).detail == "gadzooks"
    assert choose("By OD'S \n bodkins!", bad_words=str(path)).reason == "c4_bad_words"
    path.write_text("zounds\n")
    os.utime(path, ns=(0, 1))
    assert choose("So GADZOOKS!", bad_words=str(path)).reason is None, "the file has changed"
    assert choose("Zounds!", bad_words=str(path)).reason == "c4_bad_words"


def test_a_list_that_cannot_be_used_is_a_problem(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, said in (("none", "No such file"), ("empty", "holds no word"), ("latin", "not UTF-8")):
        (problem,) = problems(FiltersConfig(c4=C4Rules(bad_words=str(tmp_path / name))))
        assert "filters.c4.bad_words" in problem
        assert said in problem
    (problem,) = problems(FiltersConfig(c4=C4Rules(bad_words="$UNKNOWN_HERE/words")))
    assert problem.startswith("filters.c4.bad_words: ")
