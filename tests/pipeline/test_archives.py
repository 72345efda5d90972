"""Archives as they are distributed, damaged, malicious, nested; sizes that headers claim, and bombs."""

import gzip
import hashlib
import lzma
import tarfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import COMPRESSORS, files, measured, openwebtext, outcomes, read_all, tar, text_of, write_table

from declutr.pipeline.readers.corpus import END, Document, ReadFailure
from declutr.pipeline.readers.planning import file_parts

NAME = "openwebtext.tar.xz"


def expected(num_subsets, num_documents, prefix=f"{NAME}!openwebtext/"):
    return [
        (f"{prefix}urlsf_subset{s:02d}-{s}_data.xz!{n:07d}-{s:032x}.txt", text_of(s, n).decode())
        for s in range(num_subsets)
        for n in range(num_documents)
    ]


def test_openwebtext_is_read_as_it_is_distributed_and_when_the_outer_archive_was_unpacked(tmp_path):
    for name, data in [(NAME, lzma.compress(tar(openwebtext(6, 30)))), *openwebtext(3, 10)[1:]]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for unit_mib in (64.0, 0.01):
        assert outcomes(read_all(files(tmp_path / NAME), unit_mib)) == expected(6, 30)
    assert outcomes(read_all(files(tmp_path, exclude=[NAME]))) == expected(3, 10, "openwebtext/")
    assert outcomes(read_all(files(tmp_path / "openwebtext" / "*.xz"), 0.001)) == expected(3, 10, "")


def spaces():
    """64 MiB of them, compressed."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([*(packer.compress(b" " * (1 << 20)) for _ in range(64)), packer.flush()])


MEMBERS = [("first.txt", b"first", "first"), ("../outside.txt", b"evil", "unsafe_name")]
MEMBERS += [("/absolute.txt", b"evil", "unsafe_name"), ("device.txt", "CHRTYPE", "not_a_file")]
MEMBERS += [(f"{kind}.txt", kind, "not_a_file") for kind in ("FIFOTYPE", "SYMTYPE", "LNKTYPE")]
MEMBERS += [("folder", "DIRTYPE", None), (".hidden.txt", b"hidden", None), ("latin.txt", b"caf\xe9", "invalid_utf8")]
MEMBERS += [("empty.txt", b"", ""), ("picture.png", b"\x89PNG", "unknown_format"), ("last.txt", b"last", "last")]


def test_every_bad_member_is_recorded_and_the_rest_is_read(tmp_path):
    inner = lzma.compress(tar([member[:2] for member in MEMBERS]))
    long = lzma.compress(tar([("lost.txt", bytes(range(33, 127)) * 5000), ("lost too.txt", b"x")]), preset=0)
    outer = tar([("a_data.xz", inner), ("b_data.xz", long[: len(long) // 2]), ("c_data.xz", inner)])
    (tmp_path / NAME).write_bytes(lzma.compress(outer))
    records = read_all(files(tmp_path))
    before, after = (
        [(f"{NAME}!{letter}_data.xz!{name}", outcome) for name, _, outcome in MEMBERS if outcome is not None]
        for letter in "ac"
    )
    broken = [(f"{NAME}!b_data.xz!lost.txt", "unreadable"), (f"{NAME}!b_data.xz", "unreadable")]
    assert outcomes(records) == before + broken + after
    assert "is lost" in records[len(before)].message
    assert [path.name for path in tmp_path.rglob("*")] == [NAME]


@pytest.mark.parametrize("compression", [None, *COMPRESSORS])
def test_a_tar_cut_into_parts_gives_the_same_records_and_a_broken_end_is_met_when_reading(tmp_path, compression):
    texts = [hashlib.shake_256(bytes([n])).hexdigest(700 * (1 + n % 3)).encode() for n in range(60)]
    data = tar([(f"{n}.txt", text) for n, text in enumerate(texts)])
    for name, content in (("whole", data), ("broken", data[: data.index(texts[40]) + 10])):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(COMPRESSORS[compression](content) if compression else content)
        cut, whole = (read_all(files(path), size) for size in (0.02, 64.0))
        assert cut == whole
        parts = file_parts(files(path), 20_000)[0]
        assert 1 < len(parts) <= 64
        assert sum(part.num_bytes for part in parts) == path.stat().st_size
        assert [part.start for part in parts][1:] == [part.stop for part in parts][:-1]
        assert (parts[-1].stop == END) == (name == "broken")
        lost = [("broken.tar!40.txt", "unreadable"), ("broken.tar", "unreadable")] if name == "broken" else []
        assert outcomes(whole)[len(whole) - len(lost) :] == lost
        read = texts if name == "whole" else texts[:40]
        assert [record.text.encode() for record in whole[: len(whole) - len(lost)]] == read


def test_nested_archives_of_every_format_are_read_and_short_endings_are_known(tmp_path):
    members = [("a.jsonl", b'{"text": "p"}\n{"text": "q"}\n'), ("b.txt", b"p\nq")]
    members += [("c.csv", b"n,text\r\n1,p\r\n2,q\r\n"), ("d.tsv", b"text\np\nq\n")]
    for name in ("e.parquet", "f.arrow", "g.stream.arrow"):
        write_table(tmp_path / name, pa.table({"text": ["p", "q"]}))
        members.append((name.replace(".stream", ""), (tmp_path / name).read_bytes()))
        (tmp_path / name).unlink()
    inner = tar([*members, *[(f"{n}.{suffix}", pack(b)) for suffix, pack in COMPRESSORS.items() for n, b in members]])
    for suffix, pack in COMPRESSORS.items():
        (tmp_path / f"x.tar.{suffix}").write_bytes(pack(tar([("inner", pack(inner))])))
    records = read_all(files(tmp_path))
    assert not [record for record in records if isinstance(record, ReadFailure)]
    assert [record.text for record in records] == ["p", "q", "p\nq", *["p", "q"] * 5] * 5 * 4
    assert records[1] == Document("q", "x.tar.bz2!inner!a.jsonl", 14)
    archive = tar([("x.txt", b"x")])
    for name, suffix in (("a.tbz2", "bz2"), ("b.tzst", "zst"), ("c.tbz", "bz2"), ("d.txt.bgz", "gz")):
        (tmp_path / name).write_bytes(COMPRESSORS[suffix](b"x\n" if "txt" in name else archive))
        assert [text for _, text in outcomes(read_all(files(tmp_path / name)))] == ["x"]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_of_every_kind_of_tar(tmp_path, format):
    names = ["a" * 90 + ".txt", "b" * 80 + "/" + "c" * 80 + ".txt"]
    names += ["d" * 300 + "/\u00e9.txt"] if format != tarfile.USTAR_FORMAT else []
    data = tar([(name, b"x") for name in names], format=format)
    (tmp_path / "x.tar").write_bytes(data)
    assert [r.source for r in read_all(files(tmp_path))] == [f"x.tar!{name}" for name in names]
    (tmp_path / "y.tar").write_bytes(data + bytes(100_000))
    first, second = file_parts(files(tmp_path), 1 << 20)[0]
    assert first.stop == second.stop == len(data.rstrip(b"\0")) // 512 * 512 + 1024, "the end mark"


def test_a_bomb_comes_in_pieces_of_the_allowed_size(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(spaces())  # a line, and in the archive a document
    (tmp_path / "x.tar").write_bytes(tar([("x.txt.gz", spaces()), ("y.txt", b"next")]))
    *pieces, after = read_all(files(tmp_path, max_document_mib=1))
    assert ([len(piece.text) for piece in pieces], after.text) == ([1 << 20] * 128, "next")


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_members_before_damage_are_read(tmp_path, suffix):
    lines = [hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(20_000)]
    data = COMPRESSORS[suffix]("\n".join(lines).encode())
    (tmp_path / f"a.txt.{suffix}").write_bytes(data[: len(data) * 9 // 10])
    *documents, failure = read_all(files(tmp_path))
    assert (failure.reason, [record.text for record in documents]) == ("unreadable", lines[: len(documents)])
    assert len(documents) > (0 if suffix == "bz2" else 15_000)  # its blocks are 900 kB long


MAX_RSS_MIB = 450


@pytest.mark.slow
def test_nested_bombs_break_off(tmp_path):
    """64 GiB in less than a hundred kilobytes."""
    bomb = gzip.compress(gzip.compress(spaces() * 1000, 6), 6)
    (tmp_path / "x.tar").write_bytes(tar([("bomb.txt.gz", bomb), ("b.txt", b"next")]))
    found, _, peak_mib = measured(tmp_path)
    assert found.pop("unreadable") == 1
    assert 0 < found.pop("document") < 200
    assert not found
    assert peak_mib < MAX_RSS_MIB


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_large"), [("dictionary", 220), ("plain", 60)])
def test_large_texts_before_small_ones_are_read_in_bounded_memory(tmp_path, kind, num_large):
    """The texts of the dictionary would together be more than an Arrow array of strings can hold."""
    large = pa.array(["x" * 10_000_000], pa.large_string())
    small = pa.array([f"small {n}" for n in range(20_000)], pa.large_string())
    if kind == "dictionary":
        indices = pa.array([0] * num_large + list(range(1, 20_001)), pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, pa.concat_arrays([large, small]))
    else:
        column = pa.chunked_array([large] * num_large + [small])
    table, path = pa.table({"text": column}), tmp_path / "a.parquet"  # one row group
    pq.write_table(table, path, compression="zstd", row_group_size=len(table), use_dictionary=kind == "dictionary")
    assert path.stat().st_size < 200_000
    found, _, peak_mib = measured(path)
    assert found == {"document": num_large + 20_000}
    assert peak_mib < MAX_RSS_MIB


def test_the_map_of_a_sparse_file_goes_on_behind_its_header(tmp_path):
    """As GNU tar writes a file with more than four regions."""
    info = tarfile.TarInfo("holes.txt")
    info.type, info.size = b"S", 600
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    more, last = bytearray(512), bytearray(512)
    more[504] = 1
    sparse = bytes(header + more + last) + b"x" * 600 + bytes(512 - 600 % 512)
    before, after = tar([("a.txt", b"a")])[:1024], tar([("b.txt", b"b")])
    (tmp_path / "a.tar").write_bytes(before + sparse + sparse + after)
    for unit_mib in (64.0, 1e-6):
        texts = [outcome for _, outcome in outcomes(read_all(files(tmp_path), unit_mib))]
        assert texts == ["a", "not_a_file", "not_a_file", "b"]
