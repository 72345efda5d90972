"""Lines, encodings, giants and docstrings: what can be read is, what cannot is counted with its place."""

import csv
import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import COMPRESSORS, files, measured, outcomes, read_all, tar, write_records, write_table
from hypothesis import assume, given
from hypothesis import strategies as st
from mediafiles import spread
from messages import says

from declutr.pipeline.readers import lines as line_readers
from declutr.pipeline.readers.corpus import Document, Part, ReadFailure, Rules, rules_of
from declutr.pipeline.readers.files import Meter, read_part
from declutr.pipeline.readers.lines import cut, read_jsonl
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.pydocs import python_parts, read_python
from declutr.pipeline.readers.streams import Body, ByteStream


def read_lines(read, max_bytes):
    return read_jsonl(Body(ByteStream(read), "x", Rules("jsonl", ("text",), max_bytes)))


@pytest.mark.parametrize(("chunk_bytes", "is_kept"), [(200, True), (10, False)])
def test_bytes_that_are_put_back_come_again_without_a_copy_of_what_follows(chunk_bytes, is_kept):
    stream = ByteStream(io.BytesIO(bytes(range(200))).read, chunk_bytes=chunk_bytes)
    data = stream.read(10)
    stream.peek(20)  # drops what was read, if it needs more than the first chunk
    buffer = stream._buffer
    stream.unread(data[4:])
    assert (stream._buffer is buffer, stream.position, stream.read_whole(100)) == (is_kept, 4, bytes(range(4, 104)))


LINES = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b" ")), min_size=1, max_size=12)


@given(LINES, st.booleans(), st.integers(1, 40))
def test_every_line_is_read_once_however_a_file_is_cut(tmp_path_factory, lines, ends_with_newline, part_bytes):
    text = b"\n".join(lines)
    others = b"\x1f\x8b", b"BZh", b"\xfd7z", b"\x28\xb5", b"\xff\xfe", b"\xfe\xff", b"PAR1", b"ARROW1\0\0"
    assume(not text.startswith(others) and text[1:4] != b"*M\x18")  # compressed, another encoding, a table
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text + (b"\n" if ends_with_newline else b""))
    corpus = files(path)
    whole, cut = (
        [record for part in file_parts(corpus, size)[0] for record in read_part(part, rules_of(corpus), Meter())]
        for size in (1 << 30, part_bytes)
    )
    assert cut == whole
    offsets = [record.offset for record in cut]
    assert (offsets, len(cut)) == (sorted(set(offsets)), len(lines) - (lines[-1] == b"" and not ends_with_newline))


def test_sources_are_relative_to_the_root_in_order_of_names_and_every_kind_of_file_has_its_own_reading(tmp_path):
    spread(tmp_path, dict.fromkeys(("b/x.txt", "a/y.txt", ".hidden/z.txt", "a/readme.log"), b"text"))
    for corpus in (files(tmp_path), files(tmp_path / "*" / "*.txt", tmp_path / "a")):
        assert [record.source for record in read_all(corpus)] == ["a/y.txt", "b/x.txt"]
    folder = spread(tmp_path / "c", {"a.txt": b"one\n\ndocument", "b.md": b"# two\n", "c.csv": b"text\nthree\nfour\n"})
    records = read_all(files(folder, format="auto_text_file"))
    assert [text for _, text in outcomes(records)] == ["one\n\ndocument", "# two\n", "three", "four"]
    assert len(read_all(files(folder))) == 6


def test_every_problem_of_the_inputs_is_reported(tmp_path):
    write_records(tmp_path / "good.parquet", [{"body": "a"}])
    write_records(tmp_path / "numbers.parquet", [{"text": 1}])
    (tmp_path / "data.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    names = ["missing.jsonl", "good.parquet", "numbers.parquet", "data.bin", "empty"]
    problems = file_parts(files(*[tmp_path / name for name in names]), 99)[1]
    assert len(problems) >= len(names)
    assert [name for name in names if not any(name in problem for problem in problems)] == []


TEXTS = ["I figure out caf\u00e9", "\u4e2d\u6587 and \U0001f600", "a third one"]
WIDE = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


def contents(suffix):
    if suffix == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    if suffix in ("csv", "tsv"):
        target = io.StringIO()
        writer = csv.writer(target, delimiter="," if suffix == "csv" else "\t")
        writer.writerows([("id", "text"), *enumerate(TEXTS)])
        return target.getvalue()
    return "\n".join(TEXTS)


@pytest.mark.parametrize("packed", [None, "tar", *COMPRESSORS])
@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "md"])
def test_a_byte_order_mark_tells_the_encoding(tmp_path, suffix, encoding, packed):
    data, name = ("\ufeff" + contents(suffix)).encode(encoding), f"a.{suffix}"
    if packed:
        data = tar([(name, data)]) if packed == "tar" else COMPRESSORS[packed](data)
        name = f"{name}.{packed}"
    (tmp_path / name).write_bytes(data)
    whole = ["\n".join(TEXTS)] if suffix == "md" or (suffix, packed) == ("txt", "tar") else TEXTS
    for unit_mib in (64.0, 0.00001):
        assert [record.text for record in read_all(files(tmp_path), unit_mib)] == whole


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "md", "parquet", "binary.arrow"])
def test_without_a_mark_wide_text_is_no_training_data(tmp_path, suffix, encoding):
    path, raw = tmp_path / f"a.{suffix}", pa.array([text.encode(encoding) for text in TEXTS])
    if suffix in ("parquet", "binary.arrow"):
        write_table(path, pa.table({"text": raw}))
    else:
        path.write_bytes(contents(suffix).encode(encoding))
    assert {isinstance(record, Document) for record in read_all(files(path))} == {False}


NO_TEXT = [('{"text": null}', "null"), ('{"text": null, "n": ' + "9" * 5000 + "}", "null"), ('{"text": 3}', "a number")]
NO_TEXT += [('{"text": [1]}', "a list"), ('{"body": "x"}', ("'text'", "found body"))]
NO_TEXT += [('["x"]', ("line", "a list")), ("null", ("line", "null"))]


@pytest.mark.parametrize(("line", "told"), NO_TEXT)
def test_a_line_without_text_says_what_is_there(tmp_path, line, told):
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "long.jsonl").write_text(line + " " * 200)
    short, long = read_all(files(tmp_path, max_document_mib=0.0001))
    assert short.reason == long.reason == "no_text_field"
    says(short.message, told)
    if "text" in line:
        says(long.message, told)


GIANT_MIB = 150
WORDS = 'a giant document, \u4e2d\u6587 and \U0001f600 "quoted" \\ with\ttabs\n'

_SPECIAL = st.sampled_from(list(' \n\t\\"\u4e2d\U0001f600'))
TEXT = st.text(st.one_of(st.characters(codec="utf-8", exclude_characters="\0"), _SPECIAL), max_size=400)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "parquet", "arrow", "tar", "jsonl.gz"])
def test_a_long_document_is_cut_into_documents_that_make_it_up(tmp_path, suffix):
    text = " ".join(f"word{n}\u00e9" for n in range(4000))
    rows = [{"text": "short"}, {"text": text}, {"text": "after"}]
    rows[1] |= {"n": [{}]} if "jsonl" in suffix else {}
    path = write_records(tmp_path / f"a.{suffix}", rows)
    first, *pieces, last = read_all(files(path, max_document_mib=0.005))
    assert (first.text, last.text, "".join(piece.text for piece in pieces)) == ("short", "after", text)
    assert len(pieces) > 8
    assert [piece.cut for piece in (first, *pieces, last)] == [False, *[True] * (len(pieces) - 1), False, False]
    assert all(len(piece.text.encode()) <= 0.005 * 2**20 for piece in pieces)
    assert all(piece.text.endswith(" ") for piece in pieces[:-1])
    offsets = [piece.offset for piece in pieces]
    assert offsets == ([1] * len(pieces) if suffix in ("csv", "parquet", "arrow") else sorted(set(offsets)))
    if suffix == "jsonl":
        line = path.read_bytes()
        assert offsets[0] == line.index(b"\n") + 1
        assert all(line[offset : offset + 4] == b"word" for offset in offsets[1:])


@given(TEXT, st.booleans(), st.integers(64, 200))
def test_json_strings_are_cut_inside_no_escape_and_no_character(text, ascii_only, max_bytes):
    line = json.dumps({"text": text}, ensure_ascii=ascii_only).encode()
    records = list(read_lines(io.BytesIO(line).read, max_bytes))
    assert all(isinstance(record, Document) for record in records)
    assert "".join(record.text for record in records) == text


LONG_LINES = [(b'"%s\\ud800 %s"', ["invalid_utf8"]), (b'"%s\xff %s"', ["", "invalid_utf8"])]
LONG_LINES += [(b'"%s\x01 %s"', ["invalid_json"]), (b'["%s %s"]', ["no_text_field"]), (b'"%s %s" x', ["invalid_json"])]


@pytest.mark.parametrize(("raw", "results"), LONG_LINES)
def test_a_long_line_is_judged_as_a_short_one_is(raw, results):
    fill = b"word " * 40
    *records, last = read_lines(io.BytesIO(b'{"text": ' + raw % (fill, fill) + b'}\n{"text": "next"}').read, 200)
    assert last.text == "next"
    assert sorted({"" if isinstance(record, Document) else record.reason for record in records}) == results


def test_a_piece_ends_after_whitespace_or_else_between_two_characters():
    cases = ("ab cd ef", 7), ("ab cd ef", 4), (" abcdef", 4), ("\u00e9\u00e9\u00e9", 3), ("\U0001f600" * 2, 7)
    assert [cut(text.encode(), max_bytes) for text, max_bytes in cases] == [6, 3, 1, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "text_file", "jsonl", "tar"])
def test_a_giant_document_is_read_in_bounded_memory(tmp_path, kind):
    """One document of 150 MiB; in the archive its header gives the size."""
    path = tmp_path / {"tar": "a.tar", "jsonl": "a.jsonl"}.get(kind, "a.txt")
    words = {"text": WORDS.replace("\n", " "), "text_file": WORDS, "tar": WORDS}.get(kind, json.dumps(WORDS)[1:-1])
    piece = words.encode() * 10_000
    count, info = GIANT_MIB * 2**20 // len(piece) + 1, tarfile.TarInfo("a.txt")
    info.size = count * len(piece)
    with path.open("wb") as stream:
        stream.write({"jsonl": b'{"id": 1, "text": "', "tar": info.tobuf(tarfile.GNU_FORMAT)}.get(kind, b""))
        for _ in range(count):
            stream.write(piece)
        stream.write({"jsonl": b'"}\n', "tar": bytes(1024 + -info.size % 512)}.get(kind, b""))
    found, size, peak_mib = measured(path, kind if kind.startswith("text") else "auto")
    assert list(found) == ["document"]
    assert found["document"] >= size / 2**20 / 16
    assert size > GIANT_MIB * 2**20 * 0.7
    # A line of JSON is held once, as bytes; of everything else no more than a piece is held.
    assert peak_mib < (450 + GIANT_MIB if kind == "jsonl" else 450)


def test_only_the_giant_line_is_lost_and_a_byte_order_mark_is_no_text_of_a_long_line(monkeypatch):
    line = b'\xef\xbb\xbf{"text": "' + b"word " * 40 + b'"}'
    records = list(read_lines(io.BytesIO(line).read, 100))
    assert "".join(record.text for record in records) == "word " * 40
    assert [line[record.offset :][:4] for record in records[1:]] == [b"word"] * (len(records) - 1)
    monkeypatch.setattr(line_readers, "MAX_HELD_BYTES", 3_000_000)  # a chunk of the stream is smaller
    giant, small = b'{"text": "' + b"x" * 9_000_000 + b'"}', b'{"text": "kept"}'
    raw = b"\n".join([small, giant, small, giant, giant, small, small])
    records = list(read_lines(io.BytesIO(raw).read, 1_000))
    found = [getattr(record, "text", "lost") for record in records]
    assert found == ["kept", "lost", "kept", "lost", "lost", "kept", "kept"]
    assert [raw[offset : offset + 10] for offset in [record.offset for record in records]] == [b'{"text": "'] * 7


LONG = "It does what it says. " * 30


def part_of(path: Path) -> Part:
    size = path.stat().st_size
    return Part(format="python", path=str(path), source=path.name, start=0, stop=size, num_bytes=size, weight=size)


def test_a_module_is_its_docstring_and_its_public_definitions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        f'"""About the module. {LONG}"""\n'
        "raise SystemExit  # never run\n"
        'def shown(a, *, b=1):\n    """Shown.\n\n        Indented.\n    """\n'
        'def _hidden():\n    """Hidden."""\n'
        'class Thing:\n    """A thing."""\n    def act(self, x):\n        """Acts."""\n    def silent(self): ...\n'
    )
    (document,) = read_python(part_of(path))
    assert document.text.startswith("About the module.")
    assert document.text.endswith("shown(a, b)\nShown.\n\nIndented.\n\nThing\nA thing.\n\nThing.act(x)\nActs.")
    short, broken = tmp_path / "short.py", tmp_path / "broken.py"
    short.write_text('"""Short."""')
    broken.write_text(f'"""{LONG}"""\ndef (')
    assert list(read_python(part_of(short))) == []
    (failure,) = read_python(part_of(broken))
    assert (type(failure), failure.reason) == (ReadFailure, "invalid_python")


def test_the_machine_has_a_corpus_in_an_order_of_its_own():
    parts = python_parts()
    assert parts == python_parts()
    sources = {part.source for part in parts}
    assert len(parts) == len(sources) > 500
    assert "stdlib/asyncio/base_events.py" in sources
    assert not any("/tests/" in source or "/test_" in source for source in sources)
    (topics,) = [part for part in parts if part.format == "topics"]
    texts = [record.text for record in read_python(topics)]
    assert len(texts) > 70
    assert any("assert" in text for text in texts)
