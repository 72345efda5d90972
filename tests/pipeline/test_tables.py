"""CSV, Parquet and Arrow, and their columns: every row is a record, damage loses no more than it must."""

import csv
import io
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import files, outcomes, read_all, write_records, write_table
from hypothesis import given
from hypothesis import strategies as st
from messages import says
from pydantic import ValidationError

from declutr.pipeline.job.outcome import nothing_kept
from declutr.pipeline.readers import tables
from declutr.pipeline.readers.corpus import ReadFailure, Rules
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.streams import Body, ByteStream
from declutr.pipeline.readers.tables import read_delimited
from declutr.pipeline.shards.manifest import Counts

CELL = st.text(st.sampled_from('ab ,\t"\n\u00e9\U0001f600'), max_size=12)


def read_csv(data, chunk_bytes=1 << 20, delimiter=","):
    pieces = iter([data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)])
    stream = ByteStream(lambda _: next(pieces, b""))
    return list(read_delimited(Body(stream, "x", Rules("csv", ("text",), 1 << 20)), delimiter))


@given(st.lists(st.tuples(CELL, CELL), max_size=8), st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]))
def test_csv_is_read_as_the_csv_module_wrote_it(rows, delimiter, newline):
    if delimiter == "\t":  # a line of TSV that has all columns is a row
        rows = [tuple(cell.replace("\t", "") for cell in row) for row in rows]
    target = io.StringIO()
    csv.writer(target, delimiter=delimiter, lineterminator=newline).writerows([("id", "text"), *rows])
    records = read_csv(target.getvalue().encode(), 7, delimiter)
    assert [(record.text, record.offset) for record in records] == [(text, n) for n, (_, text) in enumerate(rows)]


QUOTES = {
    "opened and closed later": ('1\tb\n2\t"c\n3\td\n4\te"\n5\tf\n', ["b", '"c', "d", 'e"', "f"]),
    "closed within a line": ('1\tb\n2\t"c\n3\td "x" y\n4\te\n', ["b", '"c', 'd "x" y', "e"]),
    "never closed": ('1\t"b\n2\tc\n', ['"b', "c"]),
    "of Excel": ('1\t"b ""c"" d"\n2\t"two\nlines"\n', ['b "c" d', "two\nlines"]),
    "of one column": ('"a" b\n"c\nd"\ne "f"\n', ['"a" b', "c\nd", 'e "f"']),
    "behind the text": ('1\t"b" c\n2\td\n', ['"b" c', "d"]),
    "escaped": ('1,"a \\"b\\" c"\n2,d\n', ["invalid_csv", "d"]),
    "with commas": ('1,"a\n2,b\n3,c "d" e\n4,f\n', ["invalid_csv", "b", 'c "d" e', "f"]),
    "wrong columns": ('1,"a\n2,b,"\n3,"c, d"\n', ["a\n2,b,", "c, d"]),
    "CR alone": ('1,a\r2,"b, c"\r3,d', ["a", "b, c", "d"]), "named delimiter": ("1;a, b\n2;c\n", ["a, b", "c"]),
}  # fmt: skip


@pytest.mark.parametrize("name", QUOTES)
@pytest.mark.parametrize("chunk_bytes", [5, 1 << 20])
def test_a_quotation_mark_costs_no_row_but_its_own(name, chunk_bytes):
    body, expected = QUOTES[name]
    newline = "\r" if "CR" in name else "\n"
    delimiter = next((mark for mark in "\t;," if mark in body), "\t")
    named = "sep=;\n" if delimiter == ";" else ""
    header = "text" if "one column" in name else f"id{delimiter}text"
    records = read_csv(f"{named}{header}{newline}{body}".encode(), chunk_bytes, "\t" if delimiter == "\t" else ",")
    assert [record.reason if isinstance(record, ReadFailure) else record.text for record in records] == expected
    assert [record.offset for record in records] == list(range(len(expected)))
    if name == "escaped":
        says(records[0].message, '""')


@pytest.mark.parametrize(("delimiter", "outcome"), [(",", "invalid_csv"), ("\t", '"')])
def test_marks_that_open_a_field_on_every_line_cost_linear_time(delimiter, outcome):
    started = time.monotonic()
    records = read_csv(f"id{delimiter}text\n".encode() + f'a"{delimiter}"\n'.encode() * 20_000, delimiter=delimiter)
    assert time.monotonic() - started < 20, "minutes, were each line read again for every line before it"
    assert [text for _, text in outcomes(records)] == [outcome] * 20_000
    assert [record.offset for record in records] == list(range(20_000))


def test_rows_that_take_too_much_memory_lose_a_line_alone_and_long_lines_between_quotation_marks_fail(monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 4 << 20)
    lost, *records = read_csv(b'id,text\n1,"a\n' + b"2,b\n" * 100_000 + b'3,"c\nd"\n')
    says(lost.message, "4 MiB of memory", "quotation mark")
    assert [text for _, text in outcomes(records)] == ["b"] * 100_000 + ["c\nd"]
    monkeypatch.setattr(tables, "MAX_FIELD_BYTES", 1000)
    before = b"id,text\n" + b"1,b\n" * 20_000  # a head of 64 KiB is read at once
    records = read_csv(before + b'2,"a\n' + b"x" * 2000 + b'\nb"\n3,c\n', 500)
    assert [text for _, text in outcomes(records)][20_000:] == ["invalid_csv", "too_large", "invalid_csv", "c"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), "dictionary"])
@pytest.mark.parametrize("suffix", ["file.arrow", "stream.arrow", "parquet"])
def test_columns_of_every_type_of_text_are_read(tmp_path, kind, suffix):
    texts = ["a", None, "\u00e9\U0001f600", "", "e"]
    column = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts, pa.string()).cast(kind)
    table, path = pa.table({"n": range(5), "text": column}), tmp_path / f"a.{suffix}"
    write_table(path, table, 2)
    expected = [(path.name, text if text is not None else "no_text_field") for text in texts]
    for unit_mib in (64.0, 1e-6):
        assert outcomes(read_all(files(path), unit_mib)) == expected
    assert len(file_parts(files(path), 1)[0]) == (1 if suffix == "stream.arrow" else 3)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_and_names_that_are_no_utf8_and_tables_without_a_batch(tmp_path, suffix):
    path, raw = tmp_path / f"a.{suffix}", pa.array([b"a", b"\xff", b"c"])
    write_table(path, pa.table({"text": pa.StringArray.from_buffers(3, *raw.buffers()[1:])}))
    assert [outcome for _, outcome in outcomes(read_all(files(path)))] == ["a", "invalid_utf8", "c"]
    write_table(path, pa.table({"textual": ["a"], "text": ["b"]}), store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"textual", b"t\xff\xfetual"[:7]))
    assert [record.reason for record in read_all(files(path))] == ["unreadable"]
    (pq.ParquetWriter if suffix == "parquet" else pa.ipc.new_file)(path, pa.schema({"text": pa.string()})).close()
    assert read_all(files(path)) == []
    (tmp_path / "z.txt").write_text("good")
    assert [part.source for part in file_parts(files(tmp_path), 1000)[0]] == ["z.txt"]


def test_a_damaged_row_group_or_batch_is_lost_alone(tmp_path):
    path, texts = tmp_path / "a.parquet", [f"text {n} " * 50 for n in range(30)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10, use_dictionary=False, compression="zstd")
    data, start = bytearray(path.read_bytes()), pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[start : start + 30] = b"\xff" * 30
    path.write_bytes(data)
    for unit_mib in (64.0, 1e-6):
        records = read_all(files(path), unit_mib)
        assert [record.text for record in records[:10] + records[20:]] == texts[:10] + texts[20:]
        lost = [(failure.reason, failure.offset) for failure in records[10:20]]
        assert lost == [("unreadable", row) for row in range(10, 20)]
    # The text of the first batch cannot be decompressed, which a part behind it does not need.
    path, texts = tmp_path / "a.arrow", [f"text {n} " * 50 for n in range(30)]
    table = pa.table({"text": texts, "n": range(30)})
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table, max_chunksize=10)
    data = bytearray(path.read_bytes())
    frame = data.rindex(b"\x04\x22\x4d\x18", 0, data.index(b"text 0 "))
    data[frame : frame + 4] = b"none"
    path.write_bytes(data)
    lost, *records = read_all(files(path), 1e-6)
    assert (lost.reason, lost.offset) == ("unreadable", 0)
    assert [(record.text, record.offset) for record in records] == [(texts[n], n) for n in range(10, 30)]


ROWS = [{"id": "1", "title": "A title", "body": "The body."}, {"id": "2", "title": "", "body": "Only \u00e9 a\nbody"}]
ROWS += [{"id": "3", "title": "Only a title", "body": ""}, {"id": "4", "title": "", "body": ""}]
JOINED = ["A title\nThe body.", "Only \u00e9 a\nbody", "Only a title", ""]
SUFFIXES = ["jsonl", "csv", "tsv", "parquet", "dictionary.parquet", "file.arrow", "stream.arrow", "jsonl.gz", "csv.gz"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_several_columns_are_joined_by_newlines_without_the_empty_ones(tmp_path, suffix):
    path = write_records(tmp_path / f"a.{suffix}", ROWS)
    for unit_mib in (64.0, 1e-6):
        found = read_all(files(path, text_field=["title", "body"]), unit_mib)
        assert [text for _, text in outcomes(found)] == JOINED
        reverse = read_all(files(path, text_field=["body", "title"]), unit_mib)
        assert reverse[0].text == "The body.\nA title"
        assert [record.offset for record in reverse] == [record.offset for record in found]
    single, listed = (outcomes(read_all(files(path, text_field=name))) for name in ("body", ["body"]))
    assert single == listed


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "file.arrow"])
def test_a_null_is_left_out_and_a_row_of_nulls_or_without_a_key_or_with_a_number_is_a_failure(tmp_path, suffix):
    rows = [{"title": None, "body": "x"}, {"title": "y", "body": None}, {"title": None, "body": None}]
    found = read_all(files(write_records(tmp_path / f"a.{suffix}", rows), text_field=["title", "body"]))
    assert [text for _, text in outcomes(found)] == ["x", "y", "no_text_field"]
    path = write_records(tmp_path / "b.jsonl", [{"title": "a"}, {"title": "a", "body": 3}, {"title": "a", "body": "b"}])
    lacking, number, good = read_all(files(path, text_field=["title", "body"]))
    says(lacking.message, "'body'", "found title")
    says(number.message, "'body'", "a number")
    assert good.text == "a\nb"


@pytest.mark.parametrize("rows", [0, 2])
def test_a_column_of_type_null_is_one_of_nulls(tmp_path, rows):
    pq.write_table(pa.table({"text": pa.nulls(rows)}), tmp_path / "a.parquet")
    assert [record.message for record in read_all(files(tmp_path / "a.parquet"))] == ["the text is null"] * rows


def test_joined_texts_longer_than_a_document_are_cut(tmp_path):
    title, body = "caf\u00e9 \U0001f600 " * 40, 'word\n "quoted" ' * 60
    path = write_records(tmp_path / "a.jsonl", [{"body": body, "title": title}, {"title": None, "body": body}])
    found = read_all(files(path, text_field=["title", "body"], max_document_mib=1e-4))
    assert "".join(record.text for record in found) == f"{title}\n{body}{body}"
    places = [record.offset for record in found]
    assert places == sorted(set(places))
    (tmp_path / "b.csv").write_text(f'title,body\n"{title}",{"x " * 200}\n')
    found = read_all(files(tmp_path / "b.csv", text_field=["title", "body"], max_document_mib=1e-4))
    assert "".join(record.text for record in found) == f"{title}\n{'x ' * 200}"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, suffix):
    write_records(tmp_path / f"a.{suffix}", ROWS)
    (tmp_path / "z.txt").write_text("good")
    for column, name in (("boddy", "boddy"), (["id", "text"], "text")):
        words = f"no {'key' if 'jsonl' in suffix else 'column'} '{name}'; found "
        *failures, good = read_all(files(tmp_path, text_field=column))
        assert (good.text, [failure.reason for failure in failures]) == ("good", ["no_text_field"] * len(ROWS))
        assert all(failure.message.startswith(words) for failure in failures)
        assert all(name in failures[0].message for name in ROWS[0])
        assert ("`body`" in failures[0].message) == (name == "boddy")


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "file.arrow"])
def test_a_corpus_without_the_column_is_refused_before_it_is_read(tmp_path, suffix):
    _, (problem,) = file_parts(files(write_records(tmp_path / f"a.{suffix}", ROWS), text_field="boddy"), 1000)
    says(problem, "corpus.text_field = boddy", f"{tmp_path}/a.{suffix}", "'boddy'", "id, title")
    (tmp_path / "good.csv").write_text("boddy\nx\n")
    assert file_parts(files(tmp_path, text_field="boddy"), 1000)[1] == []


HEADERS = [("id;text;more\n1;a;b\n", ("separated by ;", "`sep=;` as its first")), ("\ufeffText,id\na,1\n", "`Text`")]
HEADERS += [("id\ttext\n1\ta\n", ("tabs", "corpus.format", "tsv")), ('"a\nb",id\na,1\n', "found a\nb, id")]
HEADERS += [('{"text": "a", "id": 1}\n{"text": "b"}\n', ("JSON", "set corpus.format to jsonl"))]


@pytest.mark.parametrize(("header", "told"), HEADERS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_header_that_is_not_what_it_seems(tmp_path, header, told, encoding):
    text = header if encoding == "utf-8" else header.strip("\ufeff")
    (tmp_path / "a.csv").write_text(text, encoding)
    _, (problem,) = file_parts(files(tmp_path / "a.csv"), 1000)
    says(problem, told)
    assert ("name another" in problem) == ("; its " not in problem), "no other column helps there"


def test_a_header_that_is_cut_off_is_no_problem_yet_and_a_column_given_twice_is(tmp_path):
    columns = [f"column{number}" for number in range(1000)]
    (tmp_path / "a.csv").write_text(",".join([*columns, "text"]) + "\n" + "x," * 1000 + "found\n")
    assert file_parts(files(tmp_path / "a.csv"), 1 << 30)[1] == []
    assert [text for _, text in outcomes(read_all(files(tmp_path / "a.csv")))] == ["found"]
    pq.write_table(pa.table([["a"], ["b"]], ["text", "text"]), tmp_path / "a.parquet")
    _, (problem,) = file_parts(files(tmp_path / "a.parquet"), 1000)
    assert "2 columns 'text'" in problem
    for columns in ([], ["a", "a"], 3, {"a": 1}):
        with pytest.raises(ValidationError):
            files("a", text_field=columns)


REASONS = [({"no_text_field": 60}, 60, "all 60 failed;60 no_text_field;corpus.text_field;[title,body];The first")]
REASONS += [({"invalid_utf8": 739}, 741, "739 of 741 documents;739 invalid_utf8;UTF-8"), ({}, 0, "empty;no documents")]
REASONS += [({"unreadable": 1, "nul_bytes": 8}, 10, "9 of 10;UTF-8;nul_bytes;b:0")]
REASONS += [({"unreadable": 2}, 2, "corpus.paths;corpus.format")]
REASONS += [({"invalid_json": 1}, 1, "no document;all 1 failed;1 invalid_json")]


@pytest.mark.parametrize(("failed", "read", "told"), REASONS)
def test_a_corpus_that_cannot_be_read_says_why_with_an_example(make_config, tmp_path, failed, read, told):
    dropped = {"too_short": read - sum(failed.values())}
    counts = Counts(read=read, kept=0, failed=failed, dropped=dropped, text_bytes=9, longest_tokens=2)
    places = zip("ab", failed, strict=False)
    failures = [ReadFailure(reason=reason, source=source, offset=0, message="m") for source, reason in places]
    message = nothing_kept(counts, make_config(tmp_path), failures)
    says(message, *told.split(";"))
    assert "long enough" not in message
