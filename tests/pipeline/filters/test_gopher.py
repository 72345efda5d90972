import pytest

from declutr.pipeline.filters.document_filter import DocumentFilter, FiltersConfig
from declutr.pipeline.filters.gopher import GopherQuality

OFF = dict.fromkeys(GopherQuality.model_fields)


def reason_of(text, **rules):
    return DocumentFilter(FiltersConfig(gopher=GopherQuality(**OFF | rules))).apply(text).reason


@pytest.mark.parametrize(
    ("rule", "inside", "outside", "reason"),
    [
        ({"min_words": 50}, "word " * 50, "word " * 49, "gopher_word_count"),
        ({"max_words": 100_000}, "word " * 100_000, "word " * 100_001, "gopher_word_count"),
        ({"min_mean_word_characters": 3}, "ab abcd", "ab abc", "gopher_word_length"),
        ({"max_mean_word_characters": 10}, "a" * 10, "a" * 10 + " " + "b" * 11, "gopher_word_length"),
        ({"max_symbols_per_word": 0.1}, "# " + "word " * 9, "## " + "word " * 9, "gopher_symbols"),
        ({"max_symbols_per_word": 0.1}, "so... " + "word " * 9, "so... so… " + "word " * 9, "gopher_symbols"),
        ({"max_bullet_lines": 0.9}, "* a\n" * 9 + "b", "- a\n" * 10 + "b", "gopher_bullets"),
        ({"max_bullet_lines": 0.9}, "• a\n\n\n" * 9 + "b", "  • a\n" * 19 + "b", "gopher_bullets"),
        ({"max_ellipsis_lines": 0.3}, "a...\n" * 3 + "b\n" * 7, "a… \n" * 4 + "b\n" * 6, "gopher_ellipses"),
        ({"min_words_with_letter": 0.8}, "a ü 字 4x 12", "a b c 12 -", "gopher_letters"),
        ({"min_stop_words": 2}, "The cat and dog", "the cat, the dog, Anderson", "gopher_stop_words"),
        ({"min_stop_words": 2}, "that\nbe", "that bee", "gopher_stop_words"),
    ],
)
def test_gopher_rules_drop_just_outside_their_limits(rule, inside, outside, reason):
    assert reason_of(inside, **rule) is None
    assert reason_of(outside, **rule) == reason


def test_the_defaults_are_the_published_thresholds_and_the_first_reason_wins():
    prose = "That is the way to be with people who have a mind of their own. " * 5
    document_filter = DocumentFilter(FiltersConfig(gopher=GopherQuality()))
    assert document_filter.apply(prose).reason is None
    choice = document_filter.apply("# # 1")
    assert (choice.reason, choice.detail) == ("gopher_word_count", "3 words")
