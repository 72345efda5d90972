"""Corpora built for tests: archives with whatever members, OpenWebText's own layout, and how to read them."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from processes import run_python

from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.readers.corpus import Document, FilesCorpus

COMPRESSORS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}
COMPRESSORS["zst"] = partial(pa.compress, codec="zstd", asbytes=True)


def tar(members, *, format=tarfile.GNU_FORMAT):
    """Bytes of an archive of (name, bytes) or of (name, name of a type in tarfile)."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, content = getattr(tarfile, content), b""
                info.linkname = "/etc/passwd" if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def openwebtext(num_subsets, num_documents):
    """The members of openwebtext.tar: xz archives of .txt files, one document each."""
    members = [("openwebtext", "DIRTYPE")]
    for subset in range(num_subsets):
        texts = [(f"{number:07d}-{subset:032x}.txt", text_of(subset, number)) for number in range(num_documents)]
        members.append((f"openwebtext/urlsf_subset{subset:02d}-{subset}_data.xz", lzma.compress(tar(texts), preset=0)))
    return members


def text_of(subset, number):
    return (f"Title {subset}/{number}\n\n" + f"Sentence {number * 31 % 97} of it. " * (number % 50 + 1)).encode()


def files(*paths, **changes):
    return FilesCorpus(kind="files", paths=[str(path) for path in paths], **changes)


def read_all(corpus, unit_mib=64.0):
    """All records of a corpus; every unit must say in the end that all of it was read."""
    units, problems = plan_units(corpus, unit_mib)
    assert not problems
    records = []
    for unit in units:
        reader, seen = UnitReader(unit, corpus), 0
        for record in reader:
            records.append(record)
            assert seen <= reader.bytes_read <= unit.num_bytes
            seen = reader.bytes_read
        assert reader.bytes_read == unit.num_bytes
    return records


def outcomes(records):
    return [(r.source, r.text if isinstance(r, Document) else r.reason) for r in records]


TEXT = "the span of a document is encoded and the mean of its tokens is pulled to an anchor nearby"


def sentence(number, num_words):
    words = TEXT.split()
    return " ".join(f"{words[(number * 7 + i * i) % len(words)]}{number if i == 0 else ''}" for i in range(num_words))


def write_table(path, table, rows=None, **options):
    """Writes Parquet, an Arrow stream (`.stream.arrow`) or an Arrow file by the suffix, in groups of `rows` rows."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
    else:
        with (pa.ipc.new_stream if ".stream" in path.name else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)


def write_records(path, rows, group_rows=2):
    """Writes rows by the suffix: a table, JSON lines, CSV, a text in each line, or an archive of a file for each."""
    stem, _, suffix = path.name.rpartition(".")
    if suffix in COMPRESSORS:
        plain = write_records(path.with_name(stem), rows, group_rows)
        path.write_bytes(COMPRESSORS[suffix](plain.read_bytes()))
        plain.unlink()
    elif suffix in ("parquet", "arrow"):
        table = pa.Table.from_pylist(rows)
        if ".dictionary" in path.name:
            table = pa.table({name: table[name].combine_chunks().dictionary_encode() for name in table.column_names})
        write_table(path, table, group_rows)
    elif suffix == "tar":
        path.write_bytes(tar([(f"{number}.txt", row["text"].encode()) for number, row in enumerate(rows)]))
    elif suffix in ("jsonl", "txt"):
        path.write_text("".join((json.dumps(row) if suffix == "jsonl" else row["text"]) + "\n" for row in rows))
    else:
        with path.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if suffix == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


MEASURE = """
import json, resource, sys
from collections import Counter
from pathlib import Path
from declutr.pipeline.readers.corpus import Document, FilesCorpus
from declutr.pipeline.job.units import UnitReader, plan_units
path, fixed = sys.argv[1:]
corpus = FilesCorpus(kind="files", paths=[path], format=fixed)
units, problems = plan_units(corpus, 1e6)
outcomes, size = Counter(), 0
for unit in units:
    for record in UnitReader(unit, corpus):
        good = isinstance(record, Document)
        outcomes["document" if good else record.reason] += 1
        size += len(record.text.encode()) if good else 0
status = Path("/proc/self/status")
if status.exists():  # Linux: ru_maxrss remembers the process that started this one, too
    peak_kib = int(status.read_text().partition("VmHWM:")[2].split()[0])
else:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps([problems, outcomes, size, peak_kib // 1024]))
"""


def measured(path, format="auto"):
    """Records by outcome, bytes of text and peak MiB of a process that reads the path."""
    problems, *result = json.loads(run_python("-c", MEASURE, path, format).stdout)
    assert not problems
    return result
