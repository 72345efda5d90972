"""Sentences: one a row, by all readers, or split from documents."""

import time

import pytest

from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.texts.text_rows import sentences

TEXT = (
    "Dr. Smith went to Washington, D.C. on Jan. 5, 2020. He said it cost $3.50 e.g. for two.\n\n"
    "A heading without an end\n\nIs it 3.14? Yes!   It is 😀. Ok.\n\n\n\nLast one."
)


def test_sentences_of_a_document_have_its_offset_and_all_its_characters(tmp_path, make_texts, rows_of, write_jsonl):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "First one. Second one."}, {"text": TEXT}, {"text": " "})
    rows = rows_of(make_texts({"kind": "sentences", "split": True}, path))
    assert [(row.text, row.offset) for row in rows[:2]] == [("First one.", 0), ("Second one.", 0)]
    second = path.read_bytes().index(b"\n") + 1
    mine = [row.text for row in rows if row.offset == second]
    assert "".join("".join(mine).split()) == "".join(TEXT.split())
    assert mine[0] == "Dr. Smith went to Washington, D.C. on Jan. 5, 2020."
    assert "A heading without an end" in mine
    assert "Last one." in mine
    assert [row.text for row in rows if row.offset > second] == [""]  # counted, and dropped as empty


def test_every_sentence_is_a_row_with_the_id_of_its_text(tmp_path, make_texts, prepare_units, decode):
    path = tmp_path / "a.txt"
    path.write_text("One text a row. Not split.\n\nAnother  one.\n")
    manifest, ledger, folder = prepare_units(make_texts("sentences", path))
    assert decode(folder) == [[("One text a row. Not split.", None)], [("Another one.", None)]]
    assert ledger[2].id == document_id(b"Another one.")
    assert (manifest.dropped, manifest.labels) == ({"empty": 1}, {})
    path.write_text("One text a row. Not split.\n")
    manifest, ledger, folder = prepare_units(make_texts({"kind": "sentences", "split": True}, path))
    assert decode(folder) == [[("One text a row.", None)], [("Not split.", None)]]
    assert [(entry.offset, entry.row) for entry in ledger] == [(0, 0), (0, 1)]


HOSTILE = {
    "no end": "a" * 200_000,
    "dots": "." * 200_000,
    "abbreviations": "Mr. " * 50_000,
    "quotes": ' "a. ' * 40_000,
    "brackets": "(a. " * 50_000,
    "newlines": "a\n\n" * 60_000,
    "another script": "你好。" * 60_000,
    "NUL": "a\0b. C" * 30_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_long_or_loses_a_character(name):
    text = HOSTILE[name]
    started = time.process_time()
    found = list(sentences(text, "en"))
    assert time.process_time() - started < 30  # the segmenter alone takes minutes for one of them
    assert "".join("".join(found).split()) == "".join(text.split())
    assert max(map(len, found)) <= 1 << 14


def test_windows_do_not_cut_sentences():
    text = " ".join(f"Sentence number {n} has {n % 13} things in it." for n in range(3000))
    assert list(sentences(text, "en")) == [f"Sentence number {n} has {n % 13} things in it." for n in range(3000)]


def test_the_language_changes_the_rules():
    text = "Das ist bzw. war gut. Der 3. Mai kam."
    assert list(sentences(text, "de")) == ["Das ist bzw. war gut.", "Der 3. Mai kam."]
    assert list(sentences("你好。再见。", "zh")) == ["你好。", "再见。"]


def test_the_same_text_gives_the_same_sentences_in_any_piece_of_a_file(tmp_path, make_texts, rows_of, write_jsonl):
    path = write_jsonl(tmp_path / "a.jsonl", *({"text": f"Text {n}. It is number {n}."} for n in range(200)))
    content = {"kind": "sentences", "split": True}
    whole, cut = (rows_of(make_texts(content, path, unit_mib=size)) for size in (32, 0.001))
    assert [(row.text, row.offset) for row in whole] == [(row.text, row.offset) for row in cut]
    assert len(whole) == 400
