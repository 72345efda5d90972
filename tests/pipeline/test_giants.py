"""Documents longer than any sensible one: cut at whitespace, whole again when joined, in bounded memory."""

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import files, measured, read_all, tar, write_table
from hypothesis import given
from hypothesis import strategies as st

from declutr.pipeline.readers import jsonl
from declutr.pipeline.readers.corpus import Document
from declutr.pipeline.readers.jsonl import read_jsonl
from declutr.pipeline.readers.plain_text import cut
from declutr.pipeline.readers.streams import ByteStream

GIANT_MIB = 150
MAX_RSS_MIB = 1024
WORDS = 'a giant document, \u4e2d\u6587 and \U0001f600 "quoted" \\ with\ttabs\n'

_SPECIAL = st.sampled_from(list(' \n\t\\"\u4e2d\U0001f600'))
TEXT = st.text(st.one_of(st.characters(codec="utf-8", exclude_characters="\0"), _SPECIAL), max_size=400)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "parquet", "arrow", "tar", "jsonl.gz"])
def test_a_long_document_is_cut_into_documents_that_make_it_up(tmp_path, suffix):
    text = " ".join(f"word{n}\u00e9" for n in range(4000))
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"text": ["short", text, "after"]})
    line = b'{"text": "short"}\n{"n": [{}], "text": ' + json.dumps(text).encode() + b'}\n{"text": "after"}'
    match suffix:
        case "txt":
            path.write_bytes(f"short\n{text}\nafter\n".encode())
        case "jsonl":
            path.write_bytes(line)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(line))
        case "csv":
            path.write_bytes(f'text\nshort\n"{text}"\nafter\n'.encode())
        case "parquet" | "arrow":
            write_table(path, table)
        case "tar":
            path.write_bytes(tar([("a.txt", b"short"), ("b.txt", text.encode()), ("c.txt", b"after")]))
    first, *pieces, last = read_all(files(path, max_document_mib=0.005))
    assert (first.text, last.text) == ("short", "after")
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 8
    assert all(len(piece.text.encode()) <= 0.005 * 2**20 for piece in pieces)
    assert all(piece.text.endswith(" ") for piece in pieces[:-1])
    offsets = [piece.offset for piece in pieces]
    assert offsets == ([1] * len(pieces) if suffix in ("csv", "parquet", "arrow") else sorted(set(offsets)))
    if suffix == "jsonl":
        assert offsets[0] == line.index(b"\n") + 1
        assert all(line[offset : offset + 4] == b"word" for offset in offsets[1:])


@given(TEXT, st.booleans(), st.integers(64, 200))
def test_json_strings_are_cut_inside_no_escape_and_no_character(text, ascii_only, max_bytes):
    line = json.dumps({"text": text}, ensure_ascii=ascii_only).encode()
    stream = iter([line])
    records = list(read_jsonl(ByteStream(lambda _: next(stream, b"")), "x", ("text",), max_bytes))
    assert all(isinstance(record, Document) for record in records)
    assert "".join(record.text for record in records) == text


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (b'"%s\\ud800 %s"', "invalid_utf8"),
        (b'"%s\xff %s"', ["", "invalid_utf8", ""]),
        (b'"%s\x01 %s"', "invalid_json"),
        (b'["%s %s"]', "no_text_field"),
        (b'"%s %s" x', "invalid_json"),
    ],
)
def test_a_long_line_is_judged_as_a_short_one_is(raw, outcome):
    fill = b"word " * 40
    stream = iter([b'{"text": ' + raw % (fill, fill) + b"}\n" + b'{"text": "next"}'])
    *records, last = read_jsonl(ByteStream(lambda _: next(stream, b"")), "x", ("text",), 200)
    assert last.text == "next"
    reasons = ["" if isinstance(record, Document) else record.reason for record in records]
    assert sorted(set(reasons)) == sorted({outcome} if isinstance(outcome, str) else set(outcome))


def test_a_long_first_line_is_read_behind_its_byte_order_mark():
    line = b'\xef\xbb\xbf{"text": "' + b"word " * 40 + b'"}'
    records = list(read_jsonl(ByteStream(io.BytesIO(line).read), "x", ("text",), 100))
    assert "".join(record.text for record in records) == "word " * 40
    assert [line[record.offset :][:4] for record in records[1:]] == [b"word"] * (len(records) - 1)


@pytest.mark.parametrize(
    ("text", "max_bytes", "length"),
    [("ab cd ef", 7, 6), ("ab cd ef", 4, 3), (" abcdef", 4, 1), ("\u00e9\u00e9\u00e9", 3, 2), ("\U0001f600" * 2, 7, 4)],
)
def test_a_piece_ends_after_whitespace_or_else_between_two_characters(text, max_bytes, length):
    assert cut(text.encode(), max_bytes) == length


def write_giant(path: Path, kind: str, mib: int) -> None:
    """One document of that many MiB."""
    words = {"text": WORDS.replace("\n", " "), "text_file": WORDS, "tar": WORDS}.get(kind, json.dumps(WORDS)[1:-1])
    piece = words.encode() * 10_000
    count = mib * 2**20 // len(piece) + 1
    with path.open("wb") as stream:
        if kind == "tar":
            head = tar([("a.txt", b"")])[:512]
            header = bytearray(head)
            header[124:136] = b"%011o\0" % (count * len(piece))
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            stream.write(header)
        stream.write(b'{"id": 1, "text": "' if kind == "jsonl" else b"")
        for _ in range(count):
            stream.write(piece)
        stream.write(b'"}\n' if kind == "jsonl" else bytes(1024 + -count * len(piece) % 512) if kind == "tar" else b"")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "text_file", "jsonl", "tar"])
def test_a_giant_document_is_read_in_bounded_memory(tmp_path, kind):
    path = tmp_path / ("a.tar" if kind == "tar" else "a.jsonl" if kind == "jsonl" else "a.txt")
    write_giant(path, kind, GIANT_MIB)
    found, size, peak_mib = measured(path, kind if kind.startswith("text") else "auto")
    assert list(found) == ["document"]
    assert found["document"] >= size / 2**20 / 16
    assert size > GIANT_MIB * 2**20 * 0.7
    # A line of JSON is held once, as bytes; of everything else no more than a piece is held.
    assert peak_mib < (450 + GIANT_MIB if kind == "jsonl" else 450)


def test_only_the_giant_line_is_lost(monkeypatch):
    """Two lines that are too large, one after the other and apart, are a failure each."""
    monkeypatch.setattr(jsonl, "MAX_HELD_BYTES", 3_000_000)  # a chunk of the stream is smaller
    giant, small = b'{"text": "' + b"x" * 9_000_000 + b'"}', b'{"text": "kept"}'
    raw = b"\n".join([small, giant, small, giant, giant, small, small])
    records = list(read_jsonl(ByteStream(io.BytesIO(raw).read), "x", ("text",), 1_000))
    found = [getattr(record, "text", "lost") for record in records]
    assert found == ["kept", "lost", "kept", "lost", "lost", "kept", "kept"]
    offsets = [record.offset for record in records]
    assert [raw[offset : offset + 10] for offset in offsets] == [b'{"text": "'] * 7
