import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import files, read_all
from hypothesis import assume, given
from hypothesis import strategies as st

from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.readers.corpus import Document, ReadFailure, document_id
from declutr.pipeline.readers.files import rules_of
from declutr.pipeline.readers.parts import Meter, read_part
from declutr.pipeline.readers.planning import file_parts


def read_parts(corpus, parts):
    return [record for part in parts for record in read_part(part, rules_of(corpus), Meter())]


LINES = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b" ")), min_size=1, max_size=12)


@given(LINES, st.booleans(), st.integers(1, 40))
def test_every_line_is_read_once_however_a_file_is_cut(tmp_path_factory, lines, ends_with_newline, part_bytes):
    # It looks compressed (the last one: skippable frames of zstd), like another encoding, or like a table.
    text = b"\n".join(lines)
    assume(
        not text.startswith(
            (b"\x1f\x8b", b"BZh", b"\xfd7z", b"\x28\xb5", b"\xff\xfe", b"\xfe\xff", b"PAR1", b"ARROW1\0\0")
        )
    )
    assume(text[1:4] != b"*M\x18")
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends_with_newline else b""))
    corpus = files(path)
    whole, cut = (read_parts(corpus, file_parts(corpus, size)[0]) for size in (1 << 30, part_bytes))
    assert cut == whole
    offsets = [record.offset for record in cut]
    assert offsets == sorted(set(offsets))
    assert len(cut) == len(lines) - (lines[-1] == b"" and not ends_with_newline)


@pytest.mark.parametrize("compressed", [False, True])
def test_bad_lines_are_counted_with_their_place_and_the_rest_is_read(tmp_path, compressed):
    lines = [
        json.dumps({"text": "good"}).encode(),
        b'{"text": "\xff"}',
        b"{not json",
        b'{"body": "x"}',
        b'{"text": 3}',
        b'["text"]',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "last", "other": ' + b"9" * 5000 + b"}",
        json.dumps({"text": "good too"}).encode(),
    ]
    path = tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl")
    data = b"\n".join(lines)
    path.write_bytes(gzip.compress(data) if compressed else data)
    records = read_all(files(path))
    assert [r.text if isinstance(r, Document) else r.reason for r in records] == [
        "good",
        "invalid_utf8",
        "invalid_json",
        "no_text_field",
        "no_text_field",
        "no_text_field",
        "invalid_utf8",
        "invalid_json",
        "last",  # a number that Python would refuse to turn into an int is JSON all the same
        "good too",
    ]
    assert [r.offset for r in records] == [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    assert {r.source for r in records} == {path.name}


def test_a_truncated_gzip_file_is_one_failure_after_what_could_be_read(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress("\n".join(f"line {i * i}" for i in range(50_000)).encode())[:-2000])
    *documents, failure = read_all(files(path))
    assert documents[0] == Document("line 0", "a.txt.gz", 0)
    assert isinstance(failure, ReadFailure)
    assert (failure.reason, failure.source) == ("unreadable", "a.txt.gz")


def test_parquet_is_cut_at_row_groups_and_null_is_a_failure(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a", "b", None, "d", "e"]}), path, row_group_size=2)
    corpus = files(path, text_field="body")
    assert [len(file_parts(corpus, size)[0]) for size in (1 << 20, 1)] == [1, 3]
    records = read_all(corpus, unit_mib=1e-5)
    assert [(getattr(r, "text", None), r.offset) for r in records] == [
        ("a", 0),
        ("b", 1),
        (None, 2),
        ("d", 3),
        ("e", 4),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "x"}')
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + b'"text"\nx\n')
    assert [r.text for r in read_all(files(tmp_path))] == ["x", "x"]


def test_sources_are_relative_to_the_given_root_and_order_is_by_name(tmp_path):
    for name in ("b/x.txt", "a/y.txt", ".hidden/z.txt", "a/readme.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [r.source for r in read_all(files(tmp_path))] == ["a/y.txt", "b/x.txt"]
    assert [r.source for r in read_all(files(tmp_path / "*" / "*.txt", tmp_path / "a"))] == ["a/y.txt", "b/x.txt"]


def test_every_problem_of_the_inputs_is_reported(tmp_path):
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "good.parquet")
    pq.write_table(pa.table({"text": [1]}), tmp_path / "numbers.parquet")
    (tmp_path / "data.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    names = ["missing.jsonl", "good.parquet", "numbers.parquet", "data.bin", "empty"]
    problems = file_parts(files(*[tmp_path / name for name in names]), 99)[1]
    assert len(problems) >= len(names)
    for name in names:
        assert any(name in problem for problem in problems), name


def test_a_broken_parquet_file_does_not_stop_the_others(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "b.txt").write_text("read")
    failure, document = read_all(files(tmp_path))
    assert (failure.reason, failure.source, document.text) == ("unreadable", "a.parquet", "read")


def test_the_id_is_of_the_normalised_text():
    assert normalise("  a\tb\u00a0\n c ") == "a b c"
    assert document_id(b"a b c").hex() == document_id(normalise(" a  b c").encode()).hex()
    assert len(document_id(b"")) == 16
    assert document_id(b"a") != document_id(b"A")
