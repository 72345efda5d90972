"""Files and shards that are damaged or lie: read to the end, counted or named, and never a crash."""

import gzip
import json
import tarfile

import numpy as np
import pyarrow as pa
import pytest
from corpora import COMPRESSORS, files, outcomes, read_all, tar, write_table
from mediafiles import spread
from messages import all_of, says
from preparing import make_pair, rows_of, write_jsonl
from shardfolders import poke, spoil, write

from declutr.cli.main import main
from declutr.common.errors import ShardError
from declutr.pipeline.job.outcome import losses_hint, too_many_failed
from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.readers.corpus import ReadFailure
from declutr.pipeline.shards.ledger import Losses, sum_losses
from declutr.pipeline.shards.manifest import Counts
from declutr.pipeline.shards.shards import ShardSet, check_shards
from declutr.pipeline.texts import TextRow

OFFSETS, VALUES, NUMBERS = (1, np.int32), (3, None), (1, np.int64)  # a buffer of a column, and what it holds


def swap(column, make):
    """Writes the shard anew with another column in its record batches; None: without it."""

    def change(raw):
        table = pa.ipc.open_file(pa.py_buffer(raw)).read_all()
        changed = table.drop_columns([column])
        if make is not None:
            changed = changed.append_column(column, make(table.column(column).combine_chunks()))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, changed.schema) as writer:
            writer.write_table(changed, max_chunksize=5)
        return sink.getvalue().to_pybytes()

    return change


def nulls(column):
    """The column with its first value, or that of each of its lists, left out."""
    rows = column.to_pylist()
    rows = [[None, *row[1:]] for row in rows] if pa.types.is_list(column.type) else [None, *rows[1:]]
    return pa.array(rows, column.type)


DAMAGE = {
    "tokens beyond the data": (poke("tokens", OFFSETS, {5: 2**30}), "document 0"),
    "tokens in the middle beyond the data": (poke("tokens", OFFSETS, {2: 2**30}), "document 0"),
    "tokens before the data": (poke("tokens", OFFSETS, {0: -(2**20)}), "document 0"),
    "tokens backwards": (poke("tokens", OFFSETS, {1: 12, 2: 3}), "document 0"),
    "windows beyond the data": (poke("windows", OFFSETS, {3: 2**28}), "document 0"),
    "a source beyond the data": (poke("source", OFFSETS, {2: 2**30}), "document 0"),
    "a window beyond the document": (poke("windows", VALUES, {1: 4000}), "starts at 4000, not at 4"),
    "a window before the document": (poke("windows", VALUES, {0: -4}), "starts at -4, not at 0"),
    "windows of another document": (poke("windows", OFFSETS, {1: 2}), "windows, but its"),
    "more tokens said than there are": (poke("num_tokens", NUMBERS, {0: 900}), "num_tokens = 900, but it has 14"),
    "fewer tokens said than there are": (poke("num_tokens", NUMBERS, {0: 9}), "num_tokens = 9, but it has 14"),
    "a token beyond the vocabulary": (poke("tokens", VALUES, {16: 1000}), "document 1: token id 1000 is beyond"),
    "no number of tokens": (swap("num_tokens", nulls), "num_tokens holds nulls"),
    "no token": (swap("tokens", nulls), "tokens holds nulls"),
    "tokens of another type": (swap("tokens", lambda column: column.cast(pa.list_(pa.float32()))), "tokens holds list"),
    "a column that is missing": (swap("windows", None), "columns are id, tokens, num_tokens"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_hostile_shard_is_named_by_check_and_reader_and_the_other_shards_can_be_read(tmp_path, name):
    change, words = DAMAGE[name]
    folder = write(tmp_path / "out")
    spoil(folder, change)
    says(*check_shards(folder, full=True), "train-00001.arrow", words)
    rows = [0, 18, 56, *([24] if name == "tokens beyond the data" else [])]  # other shards, and the batch behind it
    assert ShardSet(folder, "train").take(np.array(rows)).num_rows == len(rows)
    with pytest.raises(ShardError, match=all_of("train-00001.arrow", words)):
        ShardSet(folder, "train").take(np.arange(57)[::-1])


def test_a_damaged_ledger_is_named(tmp_path, capsys):
    ledger = write(tmp_path / "out") / "ledger/00001.arrow"
    write_table(ledger, pa.ipc.open_file(ledger.read_bytes()).read_all())  # not compressed
    ledger.write_bytes(poke("source", OFFSETS, {2: 2**30})(bytearray(ledger.read_bytes())))
    assert main(["inspect", str(tmp_path / "out"), "--document", "s:20"]) == 1
    says(capsys.readouterr().err, "00001.arrow", "damaged", "prepare the folder again")


def tar_with(change=bytes):
    """An archive of two texts after a change of its bytes; the header of the second one is at 1024."""
    data = bytearray(tar([("a.txt", b"first"), ("b.txt", b"second")]))
    change(data)
    return bytes(data)


def set_size(field):
    def change(data):
        data[1148:1160], data[1172:1180] = field, b" " * 8
        data[1172:1180] = b"%06o\0 " % sum(data[1024:1536])

    return change


def pax(**headers):
    """An archive whose second member has an extended header."""
    info = tarfile.TarInfo("b.txt")
    info.size, info.pax_headers = 512, {name.replace("_", "."): value for name, value in headers.items()}
    return tar_with()[:1024] + info.tobuf(tarfile.PAX_FORMAT) + b"second".ljust(512, b"\0") + bytes(1024)


def wet(record, kind=b"conversion", length=None):
    """A record of a WET file, behind a good one."""
    header = b"WARC/1.0\r\nWARC-Type: %s\r\n"
    good = header % b"conversion" + b"Content-Length: 6\r\n\r\n\xc3\xa9\nb\n!\r\n\r\n"
    return good + header % kind + (b"Content-Length: %d\r\n" % length if length else b"") + b"\r\n" + record


def frame(number):
    """A frame of zstd that its tools skip."""
    return bytes([0x50 + number]) + b"\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"


def nested(make, depth=8):
    data = b"x"
    for _ in range(depth):
        data = make(data)
    return data


WIDE = "wide".encode("utf-16-le").decode("latin-1")
BAD_LINES = {
    "invalid_utf8": [b'{"text": "\xff"}', b'{"text": "\\ud800"}'],
    "invalid_json": [b"{not json", b"[" * 100_000],
    "no_text_field": [b'{"body": "x"}', b'{"text": 3}', b'["text"]'],
    "nul_bytes": [json.dumps({"text": text}).encode() for text in (WIDE, "one \0 in a long text")],
}
JSON_LINES = {b'{"text": "good"}': "good"} | {line: reason for reason, lines in BAD_LINES.items() for line in lines}
JSON_LINES[b'{"text": "last", "other": ' + b"9" * 5000 + b"}"] = "last"  # a number that Python would refuse is JSON
CSV = b'id,text\n1,a\n2\n3,"b\nc"\n4,caf\xe9\n\n5,d\r\r6,e\n7,"never closed\n8,f\n'
UTF_16 = b"\xff\xfe" + "good\n??\nlast".encode("utf-16-le")
ZSTD = COMPRESSORS["zst"](b"a\nb\n")
BOM = b"\xef\xbb\xbf"
PRETTY = json.dumps([{"text": "a", "n": [1]}, {"text": "b"}], indent=2).encode()
TWO_TARS = tar([("a.txt", b"a")]), tar([("b.txt", b"b"), ("c.txt", b"c")])
LOST = ["first", "unreadable", "unreadable"]  # the member, and what follows it in the archive
DOCUMENTS = {
    "JSON lines": ("jsonl", b"\n".join(JSON_LINES), list(JSON_LINES.values())),
    "rows of CSV": ("csv", CSV, ["a", "invalid_csv", "b\nc", "invalid_utf8", "", "invalid_csv", "invalid_csv", "f"]),
    "a text that commas cut": ("csv", b'text\n"a, b"\na, b, c\nd,\n', ["a, b", "invalid_csv", "d"]),
    "CSV of another column": ("csv", b"body,id\n", ["no_text_field"]),
    "Parquet that is none": ("parquet", b"PAR1 but no more", ["unreadable"]),
    "a lone surrogate in UTF-16": ("txt", UTF_16.replace(b"?\0?", b"\0\xd8?"), ["good", "invalid_utf8", "last"]),
    "NUL in UTF-16": ("txt", UTF_16.replace(b"?", b"\0"), ["good", "nul_bytes", "last"]),
    "half a character of UTF-16": ("txt", "\ufeffone\ntwo".encode("utf-16-le")[:-1], ["one", "unreadable"]),
    "no character of UTF-32": ("txt", "\ufeffone\n".encode("utf-32-le") + b"\xff" * 4, ["unreadable"]),
    "a wrong checksum": ("tar", tar_with(lambda data: data.__setitem__(1024, 7)), LOST[:2]),
    "garbage for a header": ("tar", tar_with()[:1024] + b"\7" * 2000, LOST[:2]),
    "no end mark": ("tar", tar_with()[:1024], LOST[:2]),
    "no header behind the end": ("tar", tar_with() + b"no header" * 100, ["first", "second", "unreadable"]),
    "an empty archive": ("tar", b"", ["unreadable"]),
    "no record in an extended header": ("tar", pax(comment="x").replace(b"13 comment", b"xx comment"), LOST[:2]),
    "a size of 8 GiB": ("tar", tar_with(set_size(b"77777777777\0")), LOST),
    "a size of 95 bits": ("tar", tar_with(set_size(b"\x80" + b"\xff" * 11)), LOST[:2]),
    "a size of 63 bits": ("tar", tar_with(set_size(b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7)), LOST[:2]),
    "a negative size": ("tar", tar_with(set_size(b"\xff" * 12)), LOST[:2]),
    "a size of 30 digits": ("tar", pax(size="9" * 30), LOST[:2]),
    "a size of 5,000 digits": ("tar", pax(size="9" * 5000), LOST[:2]),
    "a size of 19 digits": ("tar", pax(size="9" * 19), LOST[:2]), "an exbibyte": ("tar", pax(size=str(1 << 60)), LOST),
    "a negative size in an extended header": ("tar", pax(size="-5"), LOST[:2]),
    "a file with holes": ("tar", pax(GNU_sparse_major="1", GNU_sparse_realsize="9"), ["first", "not_a_file"]),
    "archives one behind the other": ("tar", b"".join(TWO_TARS), ["a", "b", "c"]),
    "archives with a block between": ("tar", bytes(512).join(TWO_TARS), ["a", "b", "c"]),
    "archives with megabytes between": ("tar", bytes(3 * 2**20).join(TWO_TARS), ["a", "b", "c"]),
    "a mark before an object": ("jsonl", BOM + b'{"text": "x"}', ["x"]),
    "a mark before a header": ("csv", BOM + b'"text"\nx\n', ["x"]),
    "an array": ("json", b'[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    "an array of many lines": ("json", PRETTY, ["a", "b"]),
    "an object of many lines": ("json", json.dumps({"n": 1, "text": "a"}, indent=2).encode(), ["a"]),
    "an object that goes on": ("json", b'{"n": 1,\n "text": "a"\n}\n', ["a"]),
    "an object that goes on at byte 510": ("json", b'{"pad": "%s",\n "text": "a"}' % (b"x" * 496), ["a"]),
    "an object a line, the first cut": ("json", b'{"n": 1,\n{"text": "a"}\n{"text": "b"}', ["invalid_json", "a", "b"]),
    "an object a line, cut in a list": ("json", b'{"n": [\n{"text": "a"}\n{"text": "b"}', ["invalid_json", "a", "b"]),
    "an array with NaN": ("json", b'[{"text": "a"}, 3, null, {"text": NaN}]', ["invalid_json"]),
    "an array without texts": ("json", b'[{"text": "a"}, 3, {"text": 1}]', ["a", "no_text_field", "no_text_field"]),
    "an array in UTF-16": ("json", '[{"text": "é"}]'.encode("utf-16"), ["é"]),
    "an array that is cut": ("json", b'[{"text": "a"}, {"te', ["invalid_json"]),
    "an array of a long text": ("json", b'[{"text": "%s"}]' % (b"word " * 300), ["word " * 204, "word " * 96]),
    "a record of WET on a page": ("wet", wet(b"a:b\r\n\r\n", b"warcinfo", 3), ["é\nb\n!"]),
    "a page in WET": ("wet", wet(b"<p>x\n\n", b"response", 4), ["é\nb\n!", "unknown_format"]),
    "WET with a header of line feeds": ("wet", wet(b"a", length=1).replace(b"\r\n", b"\n", 4), ["é\nb\n!", "a"]),
    "WET without a length": ("wet", wet(b"text"), ["é\nb\n!", "unreadable"]),
    "WET that is cut": ("wet", wet(b"text", length=99), ["é\nb\n!", "unreadable"]),
    "no WARC in WET": ("wet", wet(b"a\r\n\r\n", length=1) + b"<html>", ["é\nb\n!", "a", "unreadable"]),
    "archives in archives": ("tar", nested(lambda data: tar([("a.tar", data)])), ["too_deep"]),
    "skippable frames": ("txt", frame(0) + ZSTD + frame(7) + ZSTD + frame(15), ["a", "b"] * 2),
    "compressed one behind the other": ("txt", COMPRESSORS["gz"](b"a\n") + COMPRESSORS["gz"](b"b\n"), ["a", "b"]),
    "damage behind lines": ("txt", COMPRESSORS["gz"](b"a\nb\nc\n") + b"\x1f\x8b\x08xxxx", [*"abc", "unreadable"]),
    "compression in compression": ("txt.gz", nested(COMPRESSORS["gz"]), ["too_deep"]),
}  # fmt: skip


@pytest.mark.parametrize("packed", [None, *COMPRESSORS])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_damaged_file_holds_is_read_and_the_rest_is_counted(tmp_path, name, packed):
    suffix, data, expected = DOCUMENTS[name]
    path = tmp_path / (f"a.{suffix}.{packed}" if packed and data else f"a.{suffix}")
    path.write_bytes(COMPRESSORS[packed](data) if packed and data else data)
    corpus = files(path, max_document_mib=1021 / 2**20 if "long" in name else 16)
    for unit_mib in (64.0, 0.0001):
        records = read_all(corpus, unit_mib)
        assert [outcome for _, outcome in outcomes(records)] == expected
        if name == "JSON lines":
            assert [record.offset for record in records] == [data.index(line) for line in JSON_LINES]


HEADER = b"premise,hypothesis,label\n"
BAD_PAIRS = {
    "empty_premise": [make_pair("", "b", 0), make_pair(" \n", "b", 0)], "empty_hypothesis": [make_pair("a", None, 0)],
    "unknown_label": [make_pair("a", "b", label) for label in ("maybe", 3, None)],
    "not_text": [*(make_pair("a", "b", label) for label in (0.5, False, ["entailment"])), make_pair(12, "b", 0)],
    "nul_bytes": [make_pair("a\0\0\0", "b", 0), HEADER + b"a\0,b,0\na,b,0\n"],
    "too_large": [make_pair("x" * 2**21, "b", 0), HEADER + b"a" * (2**26 + 1) + b",b,0\na,b,0\n"],
    "no_text_field": [b"[1, 2]"], "invalid_json": [b'{"premise": "a", ', b'{"premise": ' + b"[" * 100_000],
    "invalid_utf8": [b'{"premise": "%s", "hypothesis": "b", "label": 0}' % text for text in (b"\xff", rb"\ud800")],
    "empty": [b"  ", HEADER + b"\na,b,0\n"],
    "invalid_csv": [HEADER + b"a,b,0\n" + line for line in (b'"a,c,2\n', b"a\n", b"a,c,2,extra\n")],
    "missing_key": [b'{"sentence1": "a", "hypothesis": "b", "label": 0}', b"premise,hypothesis\na,b\n"],
}  # fmt: skip
BAD_PAIRS["not_text"] += [make_pair("a", {"text": "b"}, 0)]
BAD_PAIRS["missing_key"] += [b"premise,premise,hypothesis,label\na,x,b,0\n", b"premise,hypothesis"]
LEFT_OUT = [(row, reason) for reason, rows in BAD_PAIRS.items() for row in rows]


@pytest.mark.parametrize("number", range(len(LEFT_OUT)))
def test_a_damaged_pair_affects_only_itself(number, tmp_path, make_texts):
    bad, reason = LEFT_OUT[number]
    is_csv = isinstance(bad, bytes) and bad.startswith(b"premise")
    path, good = (tmp_path / "a.csv", ("a", "b")) if is_csv else (tmp_path / "a.jsonl", ("a", "b", "c"))
    write_jsonl(path, *([bad] if is_csv else [make_pair("a", "b", 0), bad, make_pair("a", "c", 2)]))
    corpus = {"kind": "files", "paths": [str(path)], "max_document_mib": 1}
    records = rows_of(make_texts("pairs", path, corpus=corpus))
    (left,) = [record for record in records if not isinstance(record, TextRow)]
    is_lost = is_csv and reason == "missing_key"
    assert [record.texts for record in records if isinstance(record, TextRow)] == ([] if is_lost else [good])
    assert left.reason == reason
    assert is_csv or left.offset == path.read_bytes().index(b"\n") + 1
    if isinstance(bad, dict) and bad["label"] is False:
        assert "is false, not text" in left.message
    if reason == "unknown_label":
        says(left.message, repr(bad["label"]), "entailment, neutral, contradiction, 0, 1, 2")


def test_labels_of_every_spelling_are_read(tmp_path, make_texts):
    rows = [("a", "b", " Entailment "), ("c", "12", "1"), ("d", "b", 1.0)]
    records = rows_of(make_texts("pairs", write_jsonl(tmp_path / "a.jsonl", *(make_pair(*row) for row in rows))))
    assert [record.texts for record in records] == [row[:2] for row in rows]


def rows(count, start=0):
    return b"".join(b'{"text": "document %d of many words"}\n' % n for n in range(start, start + count))


def losses_of(path, unit_mib=64.0, **options):
    units, _ = plan_units(files(path, **options), unit_mib)
    readers = [UnitReader(unit, files(path, **options)) for unit in units]
    records = [record for reader in readers for record in reader]
    failed = sum(isinstance(record, ReadFailure) for record in records)
    counts = Counts(read=len(records), kept=0, dropped={}, failed={"x": failed}, text_bytes=0, longest_tokens=0)
    return sum_losses(reader.losses for reader in readers), counts


@pytest.mark.parametrize("packing", ["gz", "zst", "member"])
def test_a_file_that_is_cut_short_weighs_like_the_whole_ones(tmp_path, packing):
    for number in range(10):
        name = f"{number}.jsonl.{'gz' if packing == 'member' else packing}"
        data = COMPRESSORS[name.rpartition(".")[2]](rows(100, 100 * number))
        data = data if number % 5 else data[:40]
        if packing == "member":
            name, data = f"{name}.tar", tar([(name, data)])
        (tmp_path / name).write_bytes(data)
    for unit_mib in (64.0, 0.001):
        losses, counts = losses_of(tmp_path, unit_mib)
        assert losses.documents() == pytest.approx(198, abs=2), "two failures are counted already"
        problem = too_many_failed(counts, [], 0.15, "documents", losses)
        says(problem, "about 198 more", "20.00%", "2 of ")
        says(problem, "2 of ", "files break off")
        assert too_many_failed(counts, [], 0.2, "documents", losses) is None


def test_a_damaged_file_weighs_by_the_bytes_behind_and_a_small_one_of_which_much_failed_is_named(tmp_path):
    data = bytearray(gzip.compress(b"".join(rows(1000, 1000 * n) for n in range(100)), mtime=0))
    data[len(data) // 2] ^= 0xFF
    losses, counts = losses_of(spread(tmp_path / "gz", {"a.jsonl.gz": data}))
    assert losses.documents() + counts.read == pytest.approx(100_000, rel=0.3)  # a chunk before the damage is lost too
    bad = b"id,text\n" + b"1,good\n" * 20 + b'1,"never" closed\n' * 80
    files = {"lines.txt": b"a line\n" * 23_000, "bad.csv": bad, "single.md": b"\xff"}
    losses, counts = losses_of(spread(tmp_path / "small", files))
    assert too_many_failed(counts, [], 0.01, "documents", losses) is None
    says(*losses_hint(losses, "documents"), "bad.csv", "80 of 100")
    long = spread(tmp_path / "long", {"a.txt": b"a line\n", "b.txt": b"word " * 1000})
    losses, _ = losses_of(long, max_document_mib=0.001)
    says(*losses_hint(losses, "documents"), "4 cuts of documents", "corpus.max_document_mib", "b.txt")


@pytest.mark.parametrize("read", [0, 7, 100])
def test_exactly_the_allowed_share_of_failures_is_allowed(read):
    for failed in range(read + 1):
        counts = Counts(read=read, failed={"x": failed})
        assert too_many_failed(counts, [], failed / max(1, read), "documents", Losses()) is None
        assert failed == 0 or too_many_failed(counts, [], (failed - 0.001) / read, "documents", Losses())
