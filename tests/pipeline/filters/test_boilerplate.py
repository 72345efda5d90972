import pytest

from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig
from declutr.pipeline.filters.lines import Boilerplate

REMOVED = {
    "cookies": ["This website uses cookies to improve your experience.", "Accept all cookies", "Cookie settings"],
    "legal": ["© 2019 Example Ltd. All rights reserved.", "Terms of Service", "Privacy Policy", "Copyright 2004 A. B."],
    "navigation": ["Skip to content", "Back to top", "Read more", "Home | News | Sport | Weather", "Sign in", "Next"],
    "sharing": ["Share on Facebook", "Tweet this", "Share this article via email", "Follow us on Twitter"],
    "counters": ["3 likes", "1,204 comments", "2.5k shares", "Page 2 of 10", "12:30 | 45"],
}
KEPT = [
    "The committee read the privacy policy and found it wanting in several respects.",
    "She baked cookies and accepted all of them.",
    "Home is where the heart is, said the man.",
    "Search parties were sent out at once.",
    "Share prices fell on Monday.",
    "We counted 3 likes and 4 dislikes among the answers of that year.",
    "Introduction",
    "a | b",
    "Copyright law is older than the printing press.",
    "We use cookies " + "because the article says so, and it goes on about them for a long while " * 3,
]


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in REMOVED.items() for line in lines])
def test_a_line_of_a_kind_is_removed_by_its_kind_and_by_no_other(kind, line):
    text = f"A real sentence.\n  {line}\n\nAnother one."
    for other in REMOVED:
        document_filter = DocumentFilter(
            FiltersConfig(boilerplate=Boilerplate(kinds=[other]), normalise_whitespace=False)
        )
        assert document_filter.apply(text).text == ("A real sentence.\n\nAnother one." if kind == other else text)


@pytest.mark.parametrize("line", KEPT)
def test_boilerplate_filter_keeps_text(line):
    document_filter = DocumentFilter(FiltersConfig(boilerplate=Boilerplate(), normalise_whitespace=False))
    assert document_filter.apply(line).text == line


def test_a_document_of_nothing_else_is_dropped_and_shown_whole():
    document_filter = DocumentFilter(FiltersConfig(boilerplate=Boilerplate()))
    choice = document_filter.apply("Skip to content\n\n3 likes\n")
    assert (choice.reason, choice.text) == ("only_boilerplate", "Skip to content 3 likes")
    assert document_filter.apply("Skip to content\nA text.").text == "A text."
