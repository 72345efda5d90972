"""Small files of every format and compression, damaged at random, are read to their ends.

DECLUTR_FUZZ=600 reads 100,000 files. Number n of a kind is always the same bytes.
"""

import csv
import io
import json
import lzma
import os
import random
import re
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import COMPRESSORS, files, openwebtext, tar
from pydantic import TypeAdapter

from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.readers.corpus import Document, ReadFailure, Rejected
from declutr.pipeline.shards.content import TRIPLE_LABELS, AnyContent
from declutr.pipeline.texts import TextRow

FILES = int(os.environ.get("DECLUTR_FUZZ", "9"))  # of each kind
_TEXTS = [f"Document {n} \u00e9\u4e2d\U0001f600: " + "some words of it, " * (n % 5) for n in range(12)]
_NUMBERS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\x01\0\0\0", b"\0\0\0\x40")


def _arrow(make, texts=_TEXTS, **options):
    target, table = io.BytesIO(), pa.table({"id": range(len(texts)), "text": texts})
    with make(target, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=5)
    return target.getvalue()


def _parquet(table, rows=5, **options):
    target = io.BytesIO()
    pq.write_table(table, target, row_group_size=rows, **options)
    return target.getvalue()


_TABLE = pa.table({"id": range(len(_TEXTS)), "text": _TEXTS})


def _sized(members):
    """An archive of which the extended headers tell the sizes."""
    data = bytearray()
    for name, content in members:
        info = tarfile.TarInfo(name)
        info.size, info.pax_headers = len(content), {"size": str(len(content))}
        data += info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)
    return bytes(data) + bytes(1024)


_ROWS = [json.dumps({"id": n, "text": text}, ensure_ascii=n % 2 == 0) for n, text in enumerate(_TEXTS)]
_JSONL = "".join(f"{row}\n" for row in _ROWS).encode()
_CSV = b"id,text\r\n" + b"".join(f'{n},"{text}\n and ""more"""\r\n'.encode() for n, text in enumerate(_TEXTS))
_MEMBERS = [("a.jsonl", _JSONL), ("b/c.txt", _TEXTS[3].encode()), ("d.csv", _CSV), ("e.parquet", _parquet(_TABLE))]
_MEMBERS += [("link.txt", "SYMTYPE"), ("n" * 150 + ".txt", b"long name")]

BASES = {
    "jsonl": _JSONL, "txt": "\n".join(_TEXTS).encode(), "csv": _CSV,
    "tsv": b"text\tid\n" + b"".join(f"{text}\t{n}\n".encode() for n, text in enumerate(_TEXTS)),
    "parquet": _parquet(_TABLE, compression="snappy"),
    "zstd.parquet": _parquet(_TABLE, compression="zstd", use_dictionary=False, data_page_version="2.0"),
    "arrow": _arrow(pa.ipc.new_file), "stream.arrow": _arrow(pa.ipc.new_stream),
    "lz4.arrow": _arrow(pa.ipc.new_file, compression="lz4"),
    "zstd.stream.arrow": _arrow(pa.ipc.new_stream, compression="zstd"),
    "dictionary.arrow": _arrow(pa.ipc.new_stream, pa.array(_TEXTS).dictionary_encode()),
    "view.arrow": _arrow(pa.ipc.new_file, pa.array(_TEXTS, pa.string_view())), "tar": tar(_MEMBERS),
    "pax.tar": tar(_MEMBERS, format=tarfile.PAX_FORMAT), "sizes.tar": _sized(_MEMBERS[:4]),
    "two.tar": tar(_MEMBERS[:2]) + tar(_MEMBERS[2:4]),
    "dictionary.parquet": _parquet(_TABLE.set_column(1, "text", pa.array(_TEXTS).dictionary_encode())),
    "md": ("# Heading\n\n" + "\n".join(_TEXTS)).encode(),
    "utf16.txt": ("\ufeff" + "\n".join(_TEXTS)).encode("utf-16-le"),
    "utf16.jsonl": ("\ufeff" + _JSONL.decode()).encode("utf-16-be"),
    "utf32.csv": ("\ufeff" + _CSV.decode()).encode("utf-32-le"), "unmarked.txt": "\n".join(_TEXTS).encode("utf-16-le"),
    "nested.tar": tar([*openwebtext(2, 3), ("inner.tar.xz", lzma.compress(tar(_MEMBERS), preset=0))]),
}  # fmt: skip


_COLUMNS = ("premise", "hypothesis", "label")
_PAIRS = [(f"Premise {n // 3}, it is.", f'Hypothesis "{n}".', n % 3) for n in range(30)]


def _delimited(delimiter):
    target = io.StringIO()
    csv.writer(target, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([_COLUMNS, *_PAIRS])
    return target.getvalue().encode()


_PAIR_TABLE = pa.table([pa.array(column) for column in zip(*_PAIRS, strict=True)], _COLUMNS)
_ENCODED = [_PAIR_TABLE[name].combine_chunks().dictionary_encode() for name in _COLUMNS[:2]]


PAIRS = {
    "jsonl": "\n".join(json.dumps(dict(zip(_COLUMNS, pair, strict=True))) for pair in _PAIRS).encode(),
    "csv": _delimited(","), "tsv": _delimited("\t"), "parquet": _parquet(_PAIR_TABLE, 10),
    "dictionary.parquet": _parquet(pa.table([*_ENCODED, _PAIR_TABLE["label"]], _COLUMNS), 10),
}  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one to six random changes; rarely none."""
    changed = bytearray(data)
    for _ in range(chance.randint(0, 6)):
        place, length = chance.randrange(len(changed) + 1), chance.choice((1, 2, 4, 8, 64, 512))
        match chance.randrange(8):
            case 0 | 1 if place < len(changed):
                changed[place] ^= 1 << chance.randrange(8)
            case 2 if place < len(changed):
                changed[place] = chance.randrange(256)
            case 3:
                del changed[place : place + length]
            case 4:
                changed[place:place] = chance.randbytes(length)
            case 5:
                changed[place:place] = changed[: chance.randrange(len(changed) + 1)][-length:]
            case 6:
                changed[place : place + 4] = chance.choice(_NUMBERS)
            case _ if chance.random() < 0.3:
                del changed[place:]
    if chance.random() < 0.5:
        _mend_checksums(changed)
    return bytes(changed)


def _mend_checksums(data: bytearray) -> None:
    """Makes headers of archives pass their check again, so that the damage is met behind it."""
    for match in re.finditer(b"ustar", bytes(data)):
        start = match.start() - 257
        if start >= 0 and len(data) >= start + 512:
            data[start + 148 : start + 156] = b" " * 8
            data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])


CONTENTS = {"documents": {"kind": "documents"}, "pairs": {"kind": "pairs"}}
CONTENTS |= {"triples": {"kind": "triples", "premise": "premise", "entailment": "hypothesis", "contradiction": "label"}}
KINDS = [
    (content, base, suffix)
    for content in CONTENTS
    for base in (BASES if content == "documents" else PAIRS)
    for suffix in (None, *COMPRESSORS)
]


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * FILES)
@pytest.mark.parametrize(("name", "base", "suffix"), KINDS)
def test_damaged_files_of_every_kind_are_read_to_the_end(tmp_path, name, base, suffix):
    path = tmp_path / (f"x.{base}.{suffix}" if suffix else f"x.{base}")
    corpus, content = files(path, max_document_mib=0.001), TypeAdapter(AnyContent).validate_python(CONTENTS[name])
    for number in range(FILES):
        chance = random.Random(f"{name}/{base}/{suffix}/{number}")
        whole = (BASES if name == "documents" else PAIRS)[base]
        first = number > 0 and (suffix is None or chance.random() < 0.5)  # the first file is undamaged
        plain = damaged(whole, chance) if first else whole
        data = COMPRESSORS[suffix](plain) if suffix else plain
        data = data if first or number == 0 else damaged(data, chance)
        path.write_bytes(data)
        large, small = (_read(path, corpus, content, unit_mib) for unit_mib in (64.0, 0.001))
        kinds = {type(record) for record in large}
        assert number > 0 or name == "triples" or base == "unmarked.txt" or kinds & {Document, TextRow}
        assert large or _may_be_empty(base, data, plain if first else None), f"file {number}: nothing read or said"
        if name == "documents" and base in ("jsonl", "txt"):
            assert large == small, f"file {number}: units of another size give other records"
        if name == "documents" and base == "jsonl" and first:  # its lines are shorter than the limit: each is a record
            lines = plain.count(b"\n") + (not plain.endswith(b"\n") and plain != b"")
            assert len(large) == lines or any(len(line) > 1000 for line in plain.split(b"\n")), f"file {number}"


def _read(path, corpus, content, unit_mib):
    """The records, or the problems, of a file, after the checks of what must hold for any bytes."""
    units, problems = plan_units(corpus, unit_mib, None, content)
    records = []
    for unit in units:
        reader = UnitReader(unit, corpus, content)
        records += list(reader)
        assert reader.bytes_read == unit.num_bytes, "bytes_read is not all of the input"
    kinds = Document if content.kind == "documents" else TextRow | Rejected
    for record in records:
        assert isinstance(record, kinds | ReadFailure)
        assert record.source == path.name or record.source.startswith(f"{path.name}!"), record.source
        assert record.offset >= 0
        if isinstance(record, Document):
            record.text.encode()
        if isinstance(record, TextRow):
            assert all(text.strip() for text in record.texts)
            assert len(record.texts) == len(record.labels) >= 2
            assert record.labels == TRIPLE_LABELS if content.kind == "triples" else {*record.labels[1:]} <= {0, 1, 2}
    premises = [" ".join(record.texts[0].split()) for record in records if isinstance(record, TextRow)]
    assert content.kind == "triples" or len(premises) == len(set(premises)), "not grouped by premise"
    return records or problems


def _may_be_empty(base: str, data: bytes, plain: bytes | None) -> bool:
    """Whether there are no bytes, no row after a header, no member; an Arrow stream may end between any messages."""
    return not data or "arrow" in base or (plain is not None and (not plain or base not in ("jsonl", "txt")))
