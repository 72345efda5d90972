"""Hybrid indexes: scores, weights and words of any script; files that someone has altered are refused in one line."""

import io
import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pytest
from encoderfiles import keys
from folders import embed_rows, static_folder
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.common.storage import hash_file
from declutr.common.words import lexical_words, num_words
from declutr.embedding.build import index as build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.postings import POSTINGS, WORDS, StoredWords, write_words
from declutr.embedding.stored import SCHEMA
from declutr.encoders.loading import load_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon

ENCODER = "hashed-words:32"
TEXTS = ["the cat sat on the mat", "a dog barked", "the mat was red", "nobody knows the trouble", "cat cat mat", "zzz"]
QUERIES = ["cat on the mat", "dog dog", "the the the", "unknown"]


@pytest.fixture
def embedded(tmp_path):
    rows = [{"text": text, "name": f"n{place}"} for place, text in enumerate(TEXTS)]
    return embed_rows(tmp_path, rows, "--id-field", "name", encoder=ENCODER, suffix=".parquet")


def plain(query, kind):
    vectors = load_encoder(ENCODER).encode([*TEXTS, query])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines, lexicon = vectors[:-1] @ vectors[-1], Lexicon(TEXTS)
    if kind == "idf":
        return cosines, lexicon.idf_cosine([query])[0]
    words = {word for word in lexical_words(query) if word in lexicon.words}
    in_texts = np.array([sum(word in lexical_words(text) for text in TEXTS) for word in words])
    largest = 2.2 * np.log1p((len(TEXTS) - in_texts + 0.5) / (in_texts + 0.5)).sum()
    return cosines, lexicon.bm25([query])[0] / max(largest, 1e-12)


@pytest.mark.parametrize("kind", ["idf", "bm25"])
def test_hybrid_score_is_cosine_plus_weighted_lexical_score(embedded, tmp_path, kind):
    build_index(embedded, tmp_path / "index", hybrid=True, lexical=kind, weight=0.7)
    index = SearchIndex(tmp_path / "index")
    for query in QUERIES:
        cosines, lexical = plain(query, kind)
        hits = index.hits(index.embed(load_encoder(ENCODER), query), 10, query)
        assert len(hits) == len(TEXTS)
        for hit in hits:
            assert hit.text == TEXTS[hit.row]
            parts = cosines[hit.row], lexical[hit.row]
            assert (hit.cosine, hit.lexical) == pytest.approx(parts, abs=1e-6)
            assert hit.score == pytest.approx(parts[0] + 0.7 * parts[1], abs=1e-6)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


@pytest.mark.parametrize("kind", ["idf", "bm25"])
def test_stored_words_of_many_texts_score_as_the_lexicon(tmp_path, kind):
    rng = np.random.default_rng(0)
    names = [f"w{number}é" for number in range(300)]
    texts = [" ".join(rng.choice(names, rng.integers(0, 30))) for _ in range(500)]
    assert write_words(tmp_path, texts, kind) == len(Lexicon(texts).words)
    stored, lexicon = StoredWords(tmp_path, 500, kind), Lexicon(texts)
    for query in (texts[3], " ".join(names), "w1é w1é w2é none", ""):
        expected = (lexicon.bm25 if kind == "bm25" else lexicon.idf_cosine)([query])[0]
        found = stored.scores(query)
        assert 0 <= found.min() <= found.max() <= 1 + 1e-6
        scale = expected.max() / found.max() if kind == "bm25" and found.any() else 1
        np.testing.assert_allclose(found * scale, expected, rtol=1e-5, atol=1e-6)


def test_search_shows_both_parts_and_takes_another_weight_which_needs_words(embedded, tmp_path, capsys, refused):
    index, place = ["index", str(embedded), "--output"], str(tmp_path / "index")
    assert main([*index, place, "--hybrid", "--weight", "0.5"]) == 0
    says(capsys.readouterr().out, "words", "14", "IDF cosine", "weight 0.5")
    (cosine, lexical) = (part[4] for part in plain("cat mat", "idf"))
    for option, weight in (([], 0.5), (["--weight", "2"], 2), (["--weight", "0"], 0)):
        assert main(["search", place, "cat mat", "--top", "1", *option]) == 0
        sums = f"{cosine + weight * lexical:6.3f} = {cosine:.3f} + {weight:g} x {lexical:.3f}"
        assert capsys.readouterr().out == f"{sums}  n4  cat cat mat\n"
    assert main(["search", place, "a", "cat", "mat"]) == 0
    says(capsys.readouterr().err, "each of the 3 words was a query")
    for weight in ("-1", "nan", "inf", "101"):
        for command in ([*index, str(tmp_path / "i"), "--hybrid"], ["search", place, "cat"]):
            refused([*command, f"--weight={weight}"], f"--weight {weight}", "0 to 100")
    for option in (["--weight", "1"], ["--lexical", "bm25"]):
        refused([*index, tmp_path / "i", *option], option[0], "--hybrid")
    assert not (tmp_path / "i").exists()
    build_index(embedded, tmp_path / "vectors")
    refused(["search", tmp_path / "vectors", "cat", "--weight", "1"], "--weight", "--hybrid")


def test_search_of_an_index_without_texts_or_for_fewer_than_one_says_so(tmp_path, capsys, refused):
    output = embed_rows(tmp_path, [{"body": "no text"}], "--skip-bad", suffix=".parquet")
    for name, options in (("a", []), ("b", ["--hybrid", "--dtype", "int8"])):
        assert main(["index", str(output), "--output", str(tmp_path / name), *options]) == 0
        refused(["search", tmp_path / name, "cat"], "no text")
    for top in ("0", "-5"):
        with pytest.raises(SystemExit):
            main(["search", "index", "cat", f"--top={top}"])
        says(capsys.readouterr().err, f"--top {top}", "at least 1")


def test_words_find_what_the_encoder_does_not_know(tmp_path, capsys, refused):
    model = static_folder(tmp_path / "words", {"cat": [1, 0], "dog": [0, 1]})
    output = embed_rows(tmp_path, ["cat and dog", "RFC2119 dog"], encoder=str(model))
    folder = str(tmp_path / "index")
    assert main(["index", str(output), "--output", folder, "--hybrid"]) == 0
    capsys.readouterr()
    assert main(["search", folder, "rfc2119"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("RFC2119 dog")
    refused(["search", folder, "neither"], "encoder knows no word", "no text")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["search", folder, "\t "])
    says(capsys.readouterr().err, "empty")
    assert main(["search", folder, " ".join(f"w{number}" for number in range(10_000)) + " cat"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("cat and dog")


def test_words_of_scripts_and_their_number_in_a_title():
    for text, words in (
        ("The cat_2's CAFÉ, naïve", ["the", "cat_2", "s", "café", "naïve"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]), ("हिन्दी में", ["हिन्दी", "में"]),
        ("東京Tower は", ["東", "京", "東京", "tower", "は"]), ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย"]),
        ("한국어 단어", ["한국어", "단어"]), ("x" * 300, ["x" * 255]), ("... \U0001f98a", []),
    ):  # fmt: skip
        assert lexical_words(text) == words
    titles = {"Introduction": 1, "A short title": 3, "見出し": 2, "a 東京": 2, "हिन्दी में": 2}
    assert {title: num_words(title) for title in titles} == titles


SIZE, ROWS = 16, 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    output = embed_rows(folder, [f"word{number} and more" for number in range(ROWS)], encoder=f"hashed-words:{SIZE}")
    build_index(output, folder / "index", hybrid=True)
    return folder


@pytest.fixture
def damaged(whole, tmp_path):
    """The embeddings, to damage; their note names the texts where they are."""
    for name in ("out.npy", "out.npy.json"):
        shutil.copy(whole / name, tmp_path)
    return tmp_path / "out.npy"


@pytest.fixture
def index(whole, tmp_path):
    return shutil.copytree(whole / "index", tmp_path / "index")


def ipc(schema, *columns, compression=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return sink.getvalue().to_pybytes()


def altered(column, place, value):

    def change(raw):
        batch = pa.ipc.open_file(raw).get_batch(0)
        columns = [cells.to_pylist() for cells in batch.columns]
        columns[column][place] = value
        return ipc(batch.schema, *columns)

    return change


def texts(rows, **options):
    return ipc(SCHEMA, [0] * len(rows), rows, rows, rows, [1] * len(rows), **options)


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


VECTORS, TABLE = "vectors.npy", "texts.arrow"
DAMAGE = {
    "half of the words": (WORDS, lambda raw: raw[: len(raw) // 2]), "no postings": (POSTINGS, lambda _: b""),
    "other columns of words": (WORDS, lambda _: ipc(pa.schema([("word", pa.large_string())]), ["a"])),
    "more texts of a word than postings": (WORDS, altered(1, 1, 5)),
    "a negative number of texts": (WORDS, altered(1, 0, -1)),
    "more texts of a word than rows": (WORDS, altered(1, 0, 2**40)),
    "no number of texts": (WORDS, altered(1, 0, None)), "a row beyond": (POSTINGS, altered(0, 39, ROWS)),
    "a negative row": (POSTINGS, altered(0, 0, -1)), "a row twice": (POSTINGS, altered(0, 3, 2)),
    "a weight that is not finite": (POSTINGS, altered(1, 0, float("nan"))),
    "half of the vectors": (VECTORS, lambda raw: raw[: len(raw) // 2]), "no vectors": (VECTORS, lambda _: b""),
    "one byte of vectors": (VECTORS, lambda _: b"\x93"), "a pickle": (VECTORS, lambda _: pickle.dumps([1])),
    "objects": (VECTORS, lambda _: npy(np.array([[print] * SIZE] * ROWS))),
    "more rows than there are": (VECTORS, header(b"(99, 16), }")),
    "a huge shape": (VECTORS, header(b"(4000000000, 16), }")), "a negative shape": (VECTORS, header(b"(-4, 16), }")),
    "a header that is code": (VECTORS, header(b"exit(16), }")),
    "vectors of another type": (VECTORS, lambda _: npy(np.zeros((ROWS, SIZE), np.float64))),
    "vectors of another size": (VECTORS, lambda _: npy(np.zeros((ROWS, SIZE + 1), np.float32))),
    "vectors that are not finite": (VECTORS, lambda _: npy(np.full((ROWS, SIZE), np.nan, np.float32))),
    "another file of vectors": (VECTORS, lambda _: b"PK\x03\x04" + bytes(100)),
    "texts that are cut off": (TABLE, lambda raw: raw[:-40]), "no texts": (TABLE, lambda _: b""),
    "offsets beyond": (TABLE, lambda _: offsets(2**31 - 1)), "offsets back": (TABLE, lambda _: offsets(-(2**20))),
    "other columns of texts": (TABLE, lambda _: ipc(pa.schema([("text", pa.int64())]), range(ROWS))),
    "fewer rows of texts": (TABLE, lambda _: texts(["x"])),
    "compressed texts": (TABLE, lambda _: texts(["x" * 500_000] * ROWS, compression="zstd")),
    "a text that is no UTF-8": (TABLE, lambda raw: raw.replace(b"word1 ", b"w\xff\xfe\xff1 ")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_altered_file_is_refused_by_its_checksum_and_with_a_right_one_too(index, damage, capsys, refused):
    name, change = DAMAGE[damage]
    raw = (index / name).read_bytes()
    (index / name).write_bytes(change(raw))
    assert (index / name).read_bytes() != raw
    refused(["search", index, "word1"], name, "missing", "altered")
    facts = json.loads((index / "index.json").read_text())
    keys("index.json", files={name: hash_file(index / name) for name in facts["files"]})(index)
    assert main(["search", str(index), "word1"]) == 1
    message = capsys.readouterr().err
    says(message, index / name)
    assert message.count("\n") == 1


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"version": 2}', b"[" * 100_000])
def test_a_damaged_list_of_contents_is_told_in_one_line(index, damaged, raw, capsys):
    search, build = ["search", str(index), "word1"], ["index", str(damaged), "--output", str(index.with_name("other"))]
    for path, command in ((index / "index.json", search), (damaged.with_name("out.npy.json"), build)):
        path.write_bytes(raw)
        assert main(command) == 1
        message = capsys.readouterr().err
        assert path.name in message
        assert (message.count("\n"), "pydantic" in message) == (1, False)
        assert len(message) < 400 + len(str(index))


def test_an_index_has_no_files_elsewhere(index):
    files = json.loads((index / "index.json").read_text())["files"]
    for name in ("../in.txt", "/etc/passwd", "..", "", "texts.arrow/../texts.arrow", "a\x1b[31m.npy"):
        keys("index.json", files=files | {name: "0"})(index)
        with pytest.raises(UsageError, match=all_of("missing", "altered")):
            SearchIndex(index)


@pytest.mark.parametrize(("value", "shape", "facts"), [
    *[(value, (40, 16), ("row 3", "finite")) for value in (np.nan, np.inf)],
    *[(0, shape, ("float32", "(40, 16)")) for shape in ((80, 8), (20, 32))],
])  # fmt: skip
def test_embeddings_that_are_not_finite_or_of_another_shape_are_not_indexed(damaged, tmp_path, value, shape, facts):
    array = np.load(damaged)
    array[3, 2] = value
    damaged.write_bytes(npy(array.reshape(shape)))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=all_of(facts)):
        build_index(damaged, tmp_path / "index", parquet=tmp_path / "map.parquet")
    assert sorted(tmp_path.iterdir()) == before


def test_an_encoder_that_gives_no_numbers_is_named(tmp_path, refused):
    model, output = static_folder(tmp_path / "words", {"cat": [np.nan, 1], "dog": [1e6, 1]}), tmp_path / "o.npy"
    for lines, dtype, record in (("cat", "float32", 0), ("dog", "float16", 0), ("dog\ncat", "int8", 1)):
        (tmp_path / f"{dtype}.txt").write_text(f"{lines}\n")
        words = ["embed", model, tmp_path / f"{dtype}.txt", "--dtype", dtype, "--output", output]
        refused(words, f"record {record}", "not finite")
        assert not output.exists()
