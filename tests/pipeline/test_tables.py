"""CSV, Parquet and Arrow: every row is a record, damage loses no more than it must."""

import csv
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import files, outcomes, read_all, write_table
from hypothesis import given
from hypothesis import strategies as st

from declutr.pipeline.readers.corpus import Document
from declutr.pipeline.readers.delimited import MAX_FIELD_BYTES, read_delimited
from declutr.pipeline.readers.planning import file_parts
from declutr.pipeline.readers.streams import ByteStream

CELL = st.text(st.sampled_from('ab ,\t"\n\u00e9\U0001f600'), max_size=12)


def read_csv(data, chunk_bytes=1 << 20, delimiter=","):
    pieces = iter([data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)])
    return list(read_delimited(ByteStream(lambda _: next(pieces, b"")), "x", ("text",), 1 << 20, delimiter))


@given(st.lists(st.tuples(CELL, CELL), max_size=8), st.sampled_from([",", "\t"]), st.sampled_from(["\n", "\r\n"]))
def test_csv_is_read_as_the_csv_module_wrote_it(rows, delimiter, newline):
    target = io.StringIO()
    csv.writer(target, delimiter=delimiter, lineterminator=newline).writerows([("id", "text"), *rows])
    records = read_csv(target.getvalue().encode(), 7, delimiter)
    assert [(record.text, record.offset) for record in records] == [(text, n) for n, (_, text) in enumerate(rows)]


def test_bad_rows_are_counted_and_the_rest_is_read():
    data = b'id,text\n1,a\n2\n3,"b\nc"\n4,caf\xe9\n\n5,d\r\r6,e\n7,"never closed\n8,f\n'
    outcome = [(r.offset, r.text if isinstance(r, Document) else r.reason) for r in read_csv(data)]
    assert outcome == [
        (0, "a"),
        (1, "invalid_csv"),
        (2, "b\nc"),
        (3, "invalid_utf8"),
        (4, ""),
        (5, "invalid_csv"),
        (6, "invalid_csv"),
    ]


def test_a_field_beyond_the_limit_is_one_failure():
    data = b"text\nfirst\n" + b"x" * (MAX_FIELD_BYTES + 10) + b"\nlast\n"
    assert [r.text if isinstance(r, Document) else r.reason for r in read_csv(data)] == ["first", "too_large", "last"]


def test_a_csv_without_the_column_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("body,id\nx,1\ny,2\n")
    (tmp_path / "b.csv").write_text("body,id\n")
    assert [r.reason for r in read_all(files(tmp_path))] == ["no_text_field"] * 3


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), "dictionary"])
@pytest.mark.parametrize("suffix", ["file.arrow", "stream.arrow", "parquet"])
def test_columns_of_every_type_of_text_are_read(tmp_path, kind, suffix):
    texts = ["a", None, "\u00e9\U0001f600", "", "e"]
    column = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts, pa.string()).cast(kind)
    table = pa.table({"n": range(5), "text": column})
    path = tmp_path / f"a.{suffix}"
    write_table(path, table, 2)
    expected = [(path.name, text if text is not None else "no_text_field") for text in texts]
    for unit_mib in (64.0, 1e-6):
        assert outcomes(read_all(files(path), unit_mib)) == expected
    assert len(file_parts(files(path), 1)[0]) == (1 if suffix == "stream.arrow" else 3)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_text_that_is_no_utf8_spoils_its_row_alone(tmp_path, suffix):
    raw = pa.array([b"a", b"\xff", b"c"])
    column = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    path = tmp_path / f"a.{suffix}"
    write_table(path, pa.table({"text": column}))
    assert [outcome for _, outcome in outcomes(read_all(files(path)))] == ["a", "invalid_utf8", "c"]


def test_a_damaged_row_group_is_lost_alone(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"text {n} " * 50 for n in range(30)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10, use_dictionary=False, compression="zstd")
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[start : start + 30] = b"\xff" * 30
    path.write_bytes(data)
    for unit_mib in (64.0, 1e-6):
        records = read_all(files(path), unit_mib)
        assert [record.text for record in records[:10] + records[20:]] == texts[:10] + texts[20:]
        assert [(failure.reason, failure.offset) for failure in records[10:20]] == [
            ("unreadable", row) for row in range(10, 20)
        ]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_column_whose_name_is_damaged_is_a_failure(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"textual": ["a"], "text": ["b"]})
    write_table(path, table, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"textual", b"t\xff\xfetual"[:7]))
    assert [record.reason for record in read_all(files(path))] == ["unreadable"]
