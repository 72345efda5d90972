"""Sizes that headers claim and bombs that files are: counted failures, in bounded memory and time."""

import gzip
import tarfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import COMPRESSORS, files, measured, outcomes, read_all, tar

from declutr.pipeline.readers.planning import file_parts

MAX_RSS_MIB = 450


def with_size(field=None, pax=None):
    """An archive of two members of which the second claims another size."""
    members = [("a.txt", b"first"), ("b.txt", b"second")]
    if pax is None:
        data = bytearray(tar(members))
        start = 1024
        data[start + 124 : start + 136] = field
        data[start + 148 : start + 156] = b"%06o\0 " % (
            sum(data[start : start + 512]) - sum(data[start + 148 : start + 156]) + 256
        )
        return bytes(data)
    info = tarfile.TarInfo("b.txt")
    info.pax_headers = {"size": pax}
    return tar(members[:1])[:1024] + info.tobuf(tarfile.PAX_FORMAT) + b"second".ljust(512, b"\0") + bytes(1024)


SIZES = {
    "30 digits": with_size(pax="9" * 30),
    "5,000 digits": with_size(pax="9" * 5000),
    "19 digits": with_size(pax="9" * 19),
    "an exbibyte": with_size(pax=str(1 << 60)),
    "negative": with_size(pax="-5"),
    "base 256": with_size(b"\x80" + b"\xff" * 11),
    "base 256, 63 bits": with_size(b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7),
    "base 256, negative": with_size(b"\xff" * 12),
}


@pytest.mark.parametrize("suffix", [None, *COMPRESSORS])
@pytest.mark.parametrize("size", SIZES)
def test_a_size_that_no_archive_can_have_loses_the_rest_and_says_so(tmp_path, size, suffix):
    path = tmp_path / (f"x.tar.{suffix}" if suffix else "x.tar")
    path.write_bytes(COMPRESSORS[suffix](SIZES[size]) if suffix else SIZES[size])
    for unit_mib in (64.0, 0.0001):
        assert file_parts(files(path), int(unit_mib * 2**20))[1] == []
        first, *failures = read_all(files(path), unit_mib)
        assert first.text == "first"
        assert {failure.reason for failure in failures} == {"unreadable"}


def test_a_member_with_holes_is_a_failure(tmp_path):
    info = tarfile.TarInfo("holes.txt")
    info.size, info.pax_headers = 512, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}
    data = info.tobuf(tarfile.PAX_FORMAT) + b"1\n0\n5\n".ljust(512, b"\0") + tar([("b.txt", b"next")])
    (tmp_path / "x.tar").write_bytes(data)
    assert outcomes(read_all(files(tmp_path))) == [("x.tar!holes.txt", "not_a_file"), ("x.tar!b.txt", "next")]


@pytest.mark.slow
def test_nested_bombs_break_off(tmp_path):
    """64 GiB in less than a hundred kilobytes."""
    packer = zlib.compressobj(9, wbits=31)
    spaces = b" " * (1 << 20)
    inner = b"".join([*(packer.compress(spaces) for _ in range(64)), packer.flush()])
    bomb = gzip.compress(gzip.compress(inner * 1000, 6), 6)
    (tmp_path / "x.tar").write_bytes(tar([("bomb.txt.gz", bomb), ("b.txt", b"next")]))
    found, _, peak_mib = measured(tmp_path)
    assert found.pop("unreadable") == 1
    assert 0 < found.pop("document") < 200
    assert not found
    assert peak_mib < MAX_RSS_MIB


def write_large_before_small(path, kind, num_large):
    """Texts of 10 MB, and behind them 20,000 small ones, in one row group of less than 200 kB."""
    large = pa.array(["x" * 10_000_000], pa.large_string())
    small = pa.array([f"small {n}" for n in range(20_000)], pa.large_string())
    if kind == "dictionary":
        indices = pa.array([0] * num_large + list(range(1, 20_001)), pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, pa.concat_arrays([large, small]))
    else:
        column = pa.chunked_array([large] * num_large + [small])
    table = pa.table({"text": column})
    pq.write_table(table, path, compression="zstd", row_group_size=len(table), use_dictionary=kind == "dictionary")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_large"), [("dictionary", 220), ("plain", 60)])
def test_large_texts_before_small_ones_are_read_in_bounded_memory(tmp_path, kind, num_large):
    """The texts of the dictionary would together be more than an Arrow array of strings can hold."""
    write_large_before_small(tmp_path / "a.parquet", kind, num_large)
    assert (tmp_path / "a.parquet").stat().st_size < 200_000
    found, _, peak_mib = measured(tmp_path)
    assert found == {"document": num_large + 20_000}
    assert peak_mib < MAX_RSS_MIB
