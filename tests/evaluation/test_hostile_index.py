"""Indexes from someone else, their checksums matching whatever was altered: an error message, and never a crash."""

import io
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.common.storage import hash_file
from declutr.embedding.build import build_index
from declutr.embedding.index import SearchIndex

SIZE, ROWS = 16, 40


@pytest.fixture
def embedded(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"word{number} and more\n" for number in range(ROWS)))
    arguments = ["embed", f"hashed-words:{SIZE}", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]
    assert main(arguments) == 0
    return tmp_path / "out.npy"


@pytest.fixture
def index(embedded, tmp_path):
    build_index(embedded, tmp_path / "index")
    return tmp_path / "index"


def sign(index):
    """Writes the checksums of what lies there now."""
    facts = json.loads((index / "index.json").read_text())
    facts["files"] = {name: hash_file(index / name) for name in facts["files"]}
    (index / "index.json").write_text(json.dumps(facts))


def npy(array, **header):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    raw = stream.getvalue()
    for old, new in header.items():
        raw = raw.replace(*(old.encode(), new.encode()))
    return raw


VECTORS = {
    "cut off": lambda raw: raw[: len(raw) // 2],
    "empty": lambda _: b"",
    "one byte": lambda _: b"\x93",
    "a pickle": lambda _: pickle.dumps([1]),
    "objects": lambda _: npy(np.array([[print] * SIZE] * ROWS)),
    "more rows than there are": lambda raw: raw.replace(b"(40, 16)", b"(99, 16)"),
    "a huge shape": lambda raw: raw.replace(b"(40, 16), }      ", b"(4000000000, 16), }"),
    "a negative shape": lambda raw: raw.replace(b"(40, 16)", b"(-4, 16)"),
    "a header that is code": lambda raw: raw.replace(b"(40, 16)", b"exit(16)"),
    "other numbers": lambda _: npy(np.zeros((ROWS, SIZE), np.float64)),
    "other size": lambda _: npy(np.zeros((ROWS, SIZE + 1), np.float32)),
    "not finite": lambda _: npy(np.full((ROWS, SIZE), np.nan, np.float32)),
    "another file": lambda _: b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("damage", VECTORS)
def test_altered_vectors_are_refused(index, damage, capsys):
    path = index / "vectors.npy"
    raw = path.read_bytes()
    altered = VECTORS[damage](raw)
    path.write_bytes(altered if altered != raw else raw[:-1])
    sign(index)
    assert main(["search", str(index), "word1"]) == 1
    told = capsys.readouterr().err
    assert str(path) in told
    assert told.count("\n") == 1


def ipc(schema, columns, compression=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def columns(texts):
    return [pa.array([0] * len(texts)), pa.array(texts, pa.large_string()), pa.array(texts), pa.array(texts)]


def offsets(last):
    """A file whose last offsets lead where there is no text."""
    start = np.zeros(ROWS, np.int32).tobytes()
    raw = ipc(SCHEMA, columns([*[""] * (ROWS - 1), "8 bytes."]))
    wide, narrow = start * 2 + b"\x08" + bytes(7), start + b"\x08" + bytes(3)
    assert (raw.count(wide), raw.count(narrow)) == (1, 3)
    return raw.replace(wide, start * 2 + np.int64(last).tobytes()).replace(narrow, start + np.int32(last).tobytes())


SCHEMA = pa.schema([("record", pa.int64()), ("text", pa.large_string()), ("id", pa.string()), ("source", pa.string())])
TEXTS = {
    "cut off": lambda raw: raw[:-40],
    "empty": lambda _: b"",
    "offsets beyond": lambda _: offsets(2**31 - 1),
    "offsets back": lambda _: offsets(-(2**20)),
    "other columns": lambda _: ipc(pa.schema([("text", pa.int64())]), [pa.array(range(ROWS))]),
    "fewer rows": lambda _: ipc(SCHEMA, columns(["x"])),
    "compressed": lambda _: ipc(SCHEMA, columns(["x" * 500_000] * ROWS), "zstd"),
    "no text": lambda raw: raw.replace(b"word1 ", b"w\xff\xfe\xff1 "),
}


@pytest.mark.parametrize("damage", TEXTS)
def test_altered_texts_are_refused(index, damage, capsys):
    path = index / "texts.arrow"
    path.write_bytes(TEXTS[damage](path.read_bytes()))
    sign(index)
    assert main(["search", str(index), "word1"]) == 1
    says(capsys.readouterr().err, "texts.arrow", "cut off", "altered", "`declutr index`")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"version": 2}', b"[" * 100_000])
def test_a_damaged_list_of_contents_is_told_in_one_line(index, embedded, raw, capsys):
    for path, command in (
        (index / "index.json", ["search", str(index), "word1"]),
        (embedded.with_name("out.npy.json"), ["index", str(embedded), "--output", str(index.with_name("other"))]),
    ):
        path.write_bytes(raw)
        assert main(command) == 1
        told = capsys.readouterr().err
        assert path.name in told
        assert told.count("\n") == 1
        assert len(told) < 400 + len(str(index))
        assert "pydantic" not in told


@pytest.mark.parametrize("name", ["../in.txt", "/etc/passwd", "..", "", "texts.arrow/../texts.arrow", "a\x1b[31m.npy"])
def test_an_index_has_no_files_elsewhere(index, name):
    facts = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(facts | {"files": facts["files"] | {name: "0"}}))
    with pytest.raises(UsageError, match=all_of("missing", "altered")):
        SearchIndex(index)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_are_not_indexed(embedded, tmp_path, value):
    array = np.load(embedded)
    array[3, 2] = value
    embedded.write_bytes(npy(array))
    with pytest.raises(UsageError, match=all_of("row 3", "finite")):
        build_index(embedded, tmp_path / "index", map_file=tmp_path / "map.parquet")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.txt", "out.npy", "out.npy.json")] == []


@pytest.mark.parametrize("array", [np.zeros((80, 8), np.float32), np.zeros((20, 32), np.float32)])
def test_embeddings_of_another_shape_are_not_indexed(embedded, tmp_path, array):
    assert len(npy(array)) == embedded.stat().st_size  # the note would not tell
    embedded.write_bytes(npy(array))
    with pytest.raises(UsageError, match=all_of("float32", "(40, 16)")):
        build_index(embedded, tmp_path / "index")


def test_a_query_without_a_known_word_is_near_to_nothing(index, capsys):
    assert main(["search", str(index), " "]) == 1
    says(capsys.readouterr().err, "empty")


def test_an_encoder_that_gives_no_numbers_is_named(tmp_path, capsys):
    (tmp_path / "v.txt").write_text("cat nan 1\ndog 1e6 1\n")
    (tmp_path / "in.txt").write_text("cat\n")
    (tmp_path / "half.txt").write_text("dog\n")
    for texts, shape in (("in.txt", []), ("half.txt", ["--dtype", "float16"])):
        output = tmp_path / "o.npy"
        assert main(["embed", str(tmp_path / "v.txt"), str(tmp_path / texts), "--output", str(output), *shape]) == 1
        assert "not finite" in capsys.readouterr().err
        assert not output.exists()
