import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from declutr.pipeline.filters.contamination import Contamination
from declutr.pipeline.filters.document_filter import DocumentFilter, FilterResult, FiltersConfig, fingerprints, problems
from declutr.pipeline.filters.evaluation_sets import build_index

_DIGITS = re.compile(r"\d+")
DOCUMENTED = {
    _DIGITS.sub("N", reason)
    for reason in re.findall(r"`(\w+)`", (Path(__file__).parents[3] / "docs/reference/filters.md").read_text())
}
ANY = st.text(alphabet=st.characters(exclude_categories=()), max_size=300)
LINES = st.lists(
    st.sampled_from(["", " ", "\x00", "\ud800", "...", "# {", "3 likes", "The end.", "\r\n", "字", "a b " * 9])
)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    (folder / "set.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen\n")
    contamination = Contamination(paths=[str(folder / "set.txt")], action="drop")
    build_index(contamination, folder / "index")
    sections = {name: {} for name in ("boilerplate", "c4", "gopher", "repetition")}
    config = FiltersConfig(**sections, language={"keep": ["en"], "min_score": 0.5}, contamination=contamination)
    # The same without the rules that drop nearly everything, so that the later ones are reached.
    late = FiltersConfig(repetition={}, language={}, contamination=contamination)
    return [DocumentFilter(one, folder / "index") for one in (config, late)]


@settings(deadline=None)
@given(st.one_of(ANY, LINES.map("\n".join), st.sampled_from("\n\x00\x1f a\ud800"), st.just("\n" * 1000)))
def test_document_filter_of_any_text_gives_a_documented_reason(everything, text):
    for document_filter in everything:
        choice = document_filter.apply(text)
        assert choice.reason is None or _DIGITS.sub("N", choice.reason) in DOCUMENTED
        assert choice.text == " ".join(choice.text.split())
        assert choice == document_filter.apply(text)
        if choice.reason:
            assert (choice.text, bool(choice.detail)) == (" ".join(text.split()), True)


@given(ANY)
def test_by_default_only_whitespace_changes(text):
    assert DocumentFilter(FiltersConfig()).apply(text) == FilterResult(" ".join(text.split()), None, None, None)
    untouched = DocumentFilter(FiltersConfig(normalise_whitespace=False))
    assert untouched.apply(text) == FilterResult(text, None, None, None)


def test_nothing_is_wrong_with_the_defaults_and_nothing_is_dropped():
    assert problems(FiltersConfig()) == []


def test_a_good_document_passes_everything(everything):
    text = (
        "The bridge that crossed the river had been closed since spring, and nobody knew when it would open.\n"
        "Most of the people who lived on the other side had to take a boat with their bicycles to be at work in time.\n"
        "In autumn the mayor promised, with a smile that few trusted, to have it finished before the first snow.\n"
    )
    for document_filter in everything:
        assert document_filter.apply(text) == FilterResult(" ".join(text.split()), None, "en", None)
    planted = text + "He counted one two three four five six seven eight nine ten eleven twelve thirteen and stopped.\n"
    assert everything[0].apply(planted).reason == "contaminated"


def test_all_problems_are_said_at_once():
    config = FiltersConfig(
        c4={"bad_words": "/none"}, language={"keep": ["xx", "yy"]}, contamination={"paths": ["/none/at/all"]}
    )
    assert len(problems(config)) == 4


def test_line_rules_see_the_lines_that_whitespace_loses():
    document_filter = DocumentFilter(
        FiltersConfig(
            gopher={
                "max_bullet_lines": 0.5,
                "min_words": 1,
                "min_mean_word_characters": 1,
                "min_words_with_letter": 0.5,
            }
        )
    )
    assert document_filter.apply("- that\n- which\n- with").reason == "gopher_bullets"
    assert document_filter.apply("- that - which - with\nnone\nbe").reason is None


def test_the_files_of_a_configuration_have_fingerprints(tmp_path):
    (tmp_path / "words").write_text("gadzooks")
    config = FiltersConfig(
        c4={"bad_words": str(tmp_path / "words")}, contamination={"paths": [str(tmp_path / "words")]}
    )
    build_index(config.contamination, tmp_path / "index")
    first = fingerprints(config)
    assert set(first) == {"filters.c4.bad_words", "filters.contamination.paths"}
    (tmp_path / "words").write_text("bodkins, one two three four five six seven eight")
    assert fingerprints(config)["filters.c4.bad_words"] != first["filters.c4.bad_words"]
    build_index(config.contamination, tmp_path / "index")
    assert not set(fingerprints(config).values()) & set(first.values())
    assert fingerprints(FiltersConfig()) == {}
