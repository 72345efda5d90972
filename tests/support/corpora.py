"""Corpora built for tests: archives with whatever members, OpenWebText's own layout, and how to read them."""

import bz2
import gzip
import io
import lzma
import tarfile
from pathlib import Path

import pyarrow as pa

from pipeline.job.units import plan_units, read_unit
from pipeline.readers.corpus import Document, FilesCorpus

COMPRESSORS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def tar(members, *, format=tarfile.GNU_FORMAT):
    """Bytes of an archive of (name, bytes) or of (name, type flag of tarfile)."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.type, info.linkname = content, "/etc/passwd"
                archive.addfile(info)
            elif content in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
                info.type = content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def openwebtext(num_subsets, num_documents):
    """The members of openwebtext.tar: xz archives of .txt files, one document each."""
    members = [("openwebtext", tarfile.DIRTYPE)]
    for subset in range(num_subsets):
        texts = [(f"{number:07d}-{subset:032x}.txt", text_of(subset, number)) for number in range(num_documents)]
        data = lzma.compress(tar(texts), preset=0)
        members.append((f"openwebtext/urlsf_subset{subset:02d}-{subset}_data.xz", data))
    return members


def text_of(subset, number):
    """A document of OpenWebText: several lines."""
    return (f"Title {subset}/{number}\n\n" + f"Sentence {number * 31 % 97} of it. " * (number % 50 + 1)).encode()


def files(*paths: Path, **changes) -> FilesCorpus:
    """A corpus of these files."""
    return FilesCorpus(kind="files", paths=[str(path) for path in paths], **changes)


def read_all(corpus, unit_mib=64.0):
    """All records of a corpus; every unit must say in the end that all of it was read."""
    units, problems = plan_units(corpus, unit_mib)
    assert not problems
    records = []
    for unit in units:
        reading = read_unit(unit, corpus)
        seen = 0
        for record in reading:
            records.append(record)
            assert seen <= reading.bytes_read <= unit.num_bytes
            seen = reading.bytes_read
        assert reading.bytes_read == unit.num_bytes
    return records


def outcomes(records):
    """(source, text or reason) of each record."""
    return [(r.source, r.text if isinstance(r, Document) else r.reason) for r in records]
