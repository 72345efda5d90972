"""Indexes, notes and embeddings from someone else: files that were altered are refused in one line, and run no code."""

import io
import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pytest
from folders import embed_rows, static_folder
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.common.storage import hash_file
from declutr.embedding.build import index as build_index
from declutr.embedding.index import SCHEMA, SearchIndex
from declutr.embedding.postings import POSTINGS, WORDS

SIZE, ROWS = 16, 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Texts, their embeddings, and a hybrid index of them."""
    folder = tmp_path_factory.mktemp("whole")
    output = embed_rows(folder, [f"word{number} and more" for number in range(ROWS)], encoder=f"hashed-words:{SIZE}")
    build_index(output, folder / "index", hybrid=True)
    return folder


@pytest.fixture
def embedded(whole, tmp_path):
    """The embeddings, to damage; their note names the texts where they are."""
    for name in ("out.npy", "out.npy.json"):
        shutil.copy(whole / name, tmp_path)
    return tmp_path / "out.npy"


@pytest.fixture
def index(whole, tmp_path):
    return shutil.copytree(whole / "index", tmp_path / "index")


def sign(index):
    """Writes the checksums of what lies there now."""
    facts = json.loads((index / "index.json").read_text())
    facts["files"] = {name: hash_file(index / name) for name in facts["files"]}
    (index / "index.json").write_text(json.dumps(facts))


def ipc(schema, *columns, compression=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def altered(column, place, value):
    """Writes the file with one number changed."""

    def change(raw):
        batch = pa.ipc.open_file(raw).get_batch(0)
        columns = [cells.to_pylist() for cells in batch.columns]
        columns[column][place] = value
        return ipc(batch.schema, *columns)

    return change


def texts(rows, **options):
    """A file of texts."""
    return ipc(SCHEMA, [0] * len(rows), rows, rows, rows, **options)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def header(shape):
    """Writes the file with another shape in its header, of the same length."""
    return lambda raw: raw.replace(b"(40, 16), }".ljust(len(shape)), shape)


def offsets(last):
    """A file whose last offsets lead where there is no text."""
    start = np.zeros(ROWS, np.int32).tobytes()
    raw = texts([*[""] * (ROWS - 1), "8 bytes."])
    wide, narrow = start * 2 + b"\x08" + bytes(7), start + b"\x08" + bytes(3)
    assert (raw.count(wide), raw.count(narrow)) == (1, 3)
    return raw.replace(wide, start * 2 + np.int64(last).tobytes()).replace(narrow, start + np.int32(last).tobytes())


def half(raw):
    return raw[: len(raw) // 2]


VECTORS, TEXTS = "vectors.npy", "texts.arrow"
DAMAGE = {
    "half of the words": (WORDS, half),
    "no postings": (POSTINGS, lambda _: b""),
    "other columns of words": (WORDS, lambda _: ipc(pa.schema([("word", pa.large_string())]), ["a"])),
    "more texts of a word than postings": (WORDS, altered(1, 1, 5)),
    "a negative number of texts": (WORDS, altered(1, 0, -1)),
    "more texts of a word than rows": (WORDS, altered(1, 0, 2**40)),
    "no number of texts": (WORDS, altered(1, 0, None)),
    "a row beyond": (POSTINGS, altered(0, 39, ROWS)),
    "a negative row": (POSTINGS, altered(0, 0, -1)),
    "a row twice": (POSTINGS, altered(0, 3, 2)),
    "a weight that is not finite": (POSTINGS, altered(1, 0, float("nan"))),
    "half of the vectors": (VECTORS, half),
    "no vectors": (VECTORS, lambda _: b""),
    "one byte of vectors": (VECTORS, lambda _: b"\x93"),
    "a pickle": (VECTORS, lambda _: pickle.dumps([1])),
    "objects": (VECTORS, lambda _: npy(np.array([[print] * SIZE] * ROWS))),
    "more rows than there are": (VECTORS, header(b"(99, 16), }")),
    "a huge shape": (VECTORS, header(b"(4000000000, 16), }")),
    "a negative shape": (VECTORS, header(b"(-4, 16), }")),
    "a header that is code": (VECTORS, header(b"exit(16), }")),
    "vectors of another type": (VECTORS, lambda _: npy(np.zeros((ROWS, SIZE), np.float64))),
    "vectors of another size": (VECTORS, lambda _: npy(np.zeros((ROWS, SIZE + 1), np.float32))),
    "vectors that are not finite": (VECTORS, lambda _: npy(np.full((ROWS, SIZE), np.nan, np.float32))),
    "another file of vectors": (VECTORS, lambda _: b"PK\x03\x04" + bytes(100)),
    "texts that are cut off": (TEXTS, lambda raw: raw[:-40]),
    "no texts": (TEXTS, lambda _: b""),
    "offsets beyond": (TEXTS, lambda _: offsets(2**31 - 1)),
    "offsets back": (TEXTS, lambda _: offsets(-(2**20))),
    "other columns of texts": (TEXTS, lambda _: ipc(pa.schema([("text", pa.int64())]), range(ROWS))),
    "fewer rows of texts": (TEXTS, lambda _: texts(["x"])),
    "compressed texts": (TEXTS, lambda _: texts(["x" * 500_000] * ROWS, compression="zstd")),
    "a text that is no UTF-8": (TEXTS, lambda raw: raw.replace(b"word1 ", b"w\xff\xfe\xff1 ")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_altered_file_is_refused_by_its_checksum_and_with_a_right_one_too(index, damage, capsys):
    name, change = DAMAGE[damage]
    raw = (index / name).read_bytes()
    (index / name).write_bytes(change(raw))
    assert (index / name).read_bytes() != raw
    assert main(["search", str(index), "word1"]) == 1
    says(capsys.readouterr().err, name, "missing", "altered")
    sign(index)
    assert main(["search", str(index), "word1"]) == 1
    message = capsys.readouterr().err
    says(message, index / name)
    assert message.count("\n") == 1


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"version": 2}', b"[" * 100_000])
def test_a_damaged_list_of_contents_is_told_in_one_line(index, embedded, raw, capsys):
    for path, command in (
        (index / "index.json", ["search", str(index), "word1"]),
        (embedded.with_name("out.npy.json"), ["index", str(embedded), "--output", str(index.with_name("other"))]),
    ):
        path.write_bytes(raw)
        assert main(command) == 1
        message = capsys.readouterr().err
        assert path.name in message
        assert message.count("\n") == 1
        assert len(message) < 400 + len(str(index))
        assert "pydantic" not in message


@pytest.mark.parametrize("name", ["../in.txt", "/etc/passwd", "..", "", "texts.arrow/../texts.arrow", "a\x1b[31m.npy"])
def test_an_index_has_no_files_elsewhere(index, name):
    facts = json.loads((index / "index.json").read_text())
    (index / "index.json").write_text(json.dumps(facts | {"files": facts["files"] | {name: "0"}}))
    with pytest.raises(UsageError, match=all_of("missing", "altered")):
        SearchIndex(index)


@pytest.mark.parametrize(
    ("value", "shape", "facts"),
    [
        *[(value, (40, 16), ("row 3", "finite")) for value in (np.nan, np.inf)],
        *[(0, shape, ("float32", "(40, 16)")) for shape in ((80, 8), (20, 32))],
    ],
)
def test_embeddings_that_are_not_finite_or_of_another_shape_are_not_indexed(embedded, tmp_path, value, shape, facts):
    array = np.load(embedded)
    array[3, 2] = value
    embedded.write_bytes(npy(array.reshape(shape)))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=all_of(facts)):
        build_index(embedded, tmp_path / "index", parquet=tmp_path / "map.parquet")
    assert sorted(tmp_path.iterdir()) == before


def test_an_encoder_that_gives_no_numbers_is_named(tmp_path, capsys):
    model, output = static_folder(tmp_path / "words", {"cat": [np.nan, 1], "dog": [1e6, 1]}), tmp_path / "o.npy"
    for lines, dtype, record in (("cat", "float32", 0), ("dog", "float16", 0), ("dog\ncat", "int8", 1)):
        (tmp_path / f"{dtype}.txt").write_text(f"{lines}\n")
        words = ["embed", model, tmp_path / f"{dtype}.txt", "--dtype", dtype, "--output", output]
        assert main([*map(str, words)]) == 1
        says(capsys.readouterr().err, f"record {record}", "not finite")
        assert not output.exists()
