"""Text that is not UTF-8: decoded where a byte order mark tells how, counted as failures where nothing does."""

import csv
import io
import json

import pyarrow as pa
import pytest
from corpora import COMPRESSORS, files, outcomes, read_all, tar, write_table
from messages import says

from declutr.pipeline.readers.corpus import Document

TEXTS = ["I figure out caf\u00e9", "\u4e2d\u6587 and \U0001f600", "a third one"]
WIDE = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]


def contents(suffix):
    """Three documents as a text of this format."""
    if suffix == "jsonl":
        return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    if suffix in ("csv", "tsv"):
        target = io.StringIO()
        rows = [("id", "text"), *enumerate(TEXTS)]
        csv.writer(target, delimiter="," if suffix == "csv" else "\t").writerows(rows)
        return target.getvalue()
    return "\n".join(TEXTS)


def expected(suffix):
    return ["\n".join(TEXTS)] if suffix == "md" else TEXTS


@pytest.mark.parametrize("packed", [None, "tar", *COMPRESSORS])
@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "md"])
def test_a_byte_order_mark_tells_the_encoding(tmp_path, suffix, encoding, packed):
    data = ("\ufeff" + contents(suffix)).encode(encoding)
    name = f"a.{suffix}"
    if packed == "tar":
        (tmp_path / "x.tar").write_bytes(tar([(name, data)]))
    else:
        (tmp_path / (f"{name}.{packed}" if packed else name)).write_bytes(COMPRESSORS[packed](data) if packed else data)
    whole = ["\n".join(TEXTS)] if suffix == "txt" and packed == "tar" else expected(suffix)
    for unit_mib in (64.0, 0.00001):
        assert [record.text for record in read_all(files(tmp_path), unit_mib)] == whole


@pytest.mark.parametrize("encoding", WIDE)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "md", "parquet", "binary.arrow"])
def test_without_a_mark_wide_text_is_no_training_data(tmp_path, suffix, encoding):
    path = tmp_path / f"a.{suffix}"
    raw = pa.array([text.encode(encoding) for text in TEXTS])
    if suffix in ("parquet", "binary.arrow"):
        write_table(path, pa.table({"text": raw}))
    else:
        path.write_bytes(contents(suffix).encode(encoding))
    records = read_all(files(path))
    assert records
    assert not [record for record in records if isinstance(record, Document)]


def test_json_strings_of_wide_text_are_failures_and_a_single_escape_is_not(tmp_path):
    wide = "wide".encode("utf-16-le").decode("latin-1")
    lines = [json.dumps({"text": text}) for text in (wide, wide * 100, "one \0 in a long text")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for mib in (16, 0.0001):
        reasons = [outcome for _, outcome in outcomes(read_all(files(tmp_path, max_document_mib=mib)))]
        assert set(reasons[:-1]) == {"nul_bytes"}
        assert reasons[-1] == "one \0 in a long text"


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (b"\x00\xd8 \x00t\x00", ["good", "invalid_utf8", "last"]),  # a lone surrogate
        (b"\x00\x00", ["good", "nul_bytes", "last"]),
    ],
)
def test_damage_in_wide_text_spoils_its_own_line(tmp_path, damage, outcome):
    lines = ["good".encode("utf-16-le"), damage, "last".encode("utf-16-le")]
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" + "\n".encode("utf-16-le").join(lines))
    assert [found for _, found in outcomes(read_all(files(tmp_path)))] == outcome


def test_wide_text_that_breaks_off_says_so(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo".encode("utf-16-le")[:-1])
    (tmp_path / "b.txt").write_bytes("\ufeffone\n".encode("utf-32-le") + b"\xff\xff\xff\xff")
    found = outcomes(read_all(files(tmp_path)))
    assert [source for source, outcome in found if outcome == "unreadable"] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"text": null}', "null"),
        ('{"text": null, "n": ' + "9" * 5000 + "}", "null"),
        ('{"text": 3}', "a number"),
        ('{"text": [1]}', "a list"),
        ('{"body": "x"}', ("'text'", "found body")),
        ('["x"]', ("line", "a list")),
        ("null", ("line", "null")),
    ],
)
def test_a_line_without_text_says_what_is_there(tmp_path, line, told):
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "long.jsonl").write_text(line + " " * 200)
    short, long = read_all(files(tmp_path, max_document_mib=0.0001))
    assert short.reason == long.reason == "no_text_field"
    says(short.message, told)
    if "text" in line:
        says(long.message, told)
