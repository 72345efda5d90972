"""Hybrid indexes, and indexes from someone else: scores of both parts, the weight, and altered files refused."""

import io
import json
import pickle

import numpy as np
import pyarrow as pa
import pytest
from folders import static_folder
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.common.storage import hash_file
from declutr.common.words import lexical_words, num_words
from declutr.embedding.build import index as build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.postings import POSTINGS, WORDS, StoredWords, write_words
from declutr.encoders.loading import load_encoder
from declutr.evaluation.retrieval.lexicon import Lexicon

ENCODER = "hashed-words:32"
TEXTS = ["the cat sat on the mat", "a dog barked", "the mat was red", "nobody knows the trouble", "cat cat mat", "zzz"]
QUERIES = ["cat on the mat", "dog dog", "the the the", "unknown"]


def embed_lines(folder, lines, encoder=ENCODER):
    """The file of embeddings of the lines."""
    (folder / "in.txt").write_text(lines)
    assert main(["embed", encoder, str(folder / "in.txt"), "--output", str(folder / "out.npy")]) == 0
    return folder / "out.npy"


@pytest.fixture
def embedded(tmp_path):
    lines = "".join(json.dumps({"text": text, "name": f"n{place}"}) + "\n" for place, text in enumerate(TEXTS))
    (tmp_path / "in.jsonl").write_text(lines)
    output = tmp_path / "out.parquet"
    assert main(["embed", ENCODER, str(tmp_path / "in.jsonl"), "--id-field", "name", "--output", str(output)]) == 0
    return output


def plain(query, kind):
    """Cosines and lexical scores of the texts."""
    vectors = load_encoder(ENCODER).encode([*TEXTS, query])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    lexicon = Lexicon(TEXTS)
    if kind == "idf":
        return vectors[:-1] @ vectors[-1], lexicon.idf_cosine([query])[0]
    known = {word for word in lexical_words(query) if word in lexicon.words}
    in_texts = np.array([sum(word in lexical_words(text) for text in TEXTS) for word in known])
    most = 2.2 * np.log1p((len(TEXTS) - in_texts + 0.5) / (in_texts + 0.5)).sum()
    return vectors[:-1] @ vectors[-1], lexicon.bm25([query])[0] / max(most, 1e-12)


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


def test_search_shows_both_parts_and_takes_another_weight(embedded, tmp_path, capsys):
    given = ["index", str(embedded), "--output", str(tmp_path / "index"), "--hybrid", "--weight", "0.5"]
    assert main(given) == 0
    says(capsys.readouterr().out, "words", "14", "IDF cosine", "weight 0.5")
    (cosine, lexical) = (part[4] for part in plain("cat mat", "idf"))
    for option, weight in (([], 0.5), (["--weight", "2"], 2), (["--weight", "0"], 0)):
        assert main(["search", str(tmp_path / "index"), "cat mat", "--top", "1", *option]) == 0
        first = capsys.readouterr().out
        assert (
            first == f"{cosine + weight * lexical:6.3f} = {cosine:.3f} + {weight:g} x {lexical:.3f}  n4  cat cat mat\n"
        )


@pytest.mark.parametrize("weight", ["-1", "nan", "inf", "101", "much", ""])
def test_weight_that_is_no_number_from_0_to_100_is_refused(embedded, tmp_path, capsys, weight):
    for command in (["index", str(embedded), "--output", str(tmp_path / "i"), "--hybrid"], ["search", "i", "cat"]):
        with pytest.raises(SystemExit):
            main([*command, f"--weight={weight}"])
        says(capsys.readouterr().err, "--weight", "0 to 100")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("options", [[], ["--hybrid", "--dtype", "int8"]])
def test_search_of_an_index_without_texts_says_so(tmp_path, capsys, options):
    output = embed_lines(tmp_path, "")
    assert main(["index", str(output), "--output", str(tmp_path / "index"), *options]) == 0
    assert main(["search", str(tmp_path / "index"), "cat"]) == 1
    says(capsys.readouterr().err, "no text")


@pytest.mark.parametrize("top", ["0", "-5"])
def test_search_for_fewer_than_one_text_is_refused(capsys, top):
    with pytest.raises(SystemExit):
        main(["search", "index", "cat", f"--top={top}"])
    says(capsys.readouterr().err, f"--top {top}", "at least 1")


def test_settings_that_need_words_are_refused_without_them(embedded, tmp_path, capsys):
    output = str(tmp_path / "index")
    for option in (["--weight", "1"], ["--lexical", "bm25"]):
        assert main(["index", str(embedded), "--output", output, *option]) == 1
        says(capsys.readouterr().err, option[0], "--hybrid")
    build_index(embedded, tmp_path / "index")
    assert main(["search", output, "cat", "--weight", "1"]) == 1
    says(capsys.readouterr().err, "--weight", "--hybrid")


def test_words_find_what_the_encoder_does_not_know(tmp_path, capsys):
    model = static_folder(tmp_path / "words", {"cat": [1, 0], "dog": [0, 1]})
    output = embed_lines(tmp_path, "cat and dog\nRFC2119 dog\n", str(model))
    folder = str(tmp_path / "index")
    assert main(["index", str(output), "--output", folder, "--hybrid"]) == 0
    capsys.readouterr()
    assert main(["search", folder, "rfc2119"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("RFC2119 dog")
    assert main(["search", folder, "neither"]) == 1
    says(capsys.readouterr().err, "encoder knows no word", "no text")
    assert main(["search", folder, "\t "]) == 1
    says(capsys.readouterr().err, "empty")
    assert main(["search", folder, " ".join(f"w{number}" for number in range(10_000)) + " cat"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("cat and dog")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The cat_2's CAFÉ, naïve", ["the", "cat_2", "s", "café", "naïve"]),
        ("e\u0301te\u0301", ["e\u0301te\u0301"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("東京Tower は", ["東", "京", "東京", "tower", "は"]),
        ("ไทย", ["ไ", "ท", "ย", "ไท", "ทย"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("x" * 300, ["x" * 255]),
        ("... \U0001f98a", []),
    ],
)
def test_lexical_words_of_scripts(text, words):
    assert lexical_words(text) == words


@pytest.mark.parametrize(
    ("text", "number"), [("Introduction", 1), ("A short title", 3), ("見出し", 2), ("a 東京", 2), ("हिन्दी में", 2)]
)
def test_words_of_a_title_are_counted_in_any_script(text, number):
    assert num_words(text) == number


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
        columns = [each.to_pylist() for each in batch.columns]
        columns[column][place] = value
        return ipc(batch.schema, *columns)

    return change


DAMAGE = {
    "cut off": (WORDS, lambda raw: raw[: len(raw) // 2]),
    "empty": (POSTINGS, lambda _: b""),
    "other columns": (WORDS, lambda _: ipc(pa.schema([("word", pa.large_string())]), ["a"])),
    "more texts than postings": (WORDS, altered(1, 0, 5)),
    "a negative number of texts": (WORDS, altered(1, 0, -1)),
    "more texts than rows": (WORDS, altered(1, 0, 2**40)),
    "no number": (WORDS, altered(1, 0, None)),
    "a row beyond": (POSTINGS, altered(0, 0, 6)),
    "a negative row": (POSTINGS, altered(0, 0, -1)),
    "a row twice": (POSTINGS, lambda raw: altered(0, 3, pa.ipc.open_file(raw).get_batch(0)[0][2].as_py())(raw)),
    "a weight that is not finite": (POSTINGS, altered(1, 0, float("nan"))),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_altered_words_with_right_checksums_are_refused(tmp_path, damage, capsys):
    folder = tmp_path / "index"
    build_index(embed_lines(tmp_path, "cat mat\ncat hat\ncat\ncat\ncat\ncat\n"), folder, hybrid=True)
    name, change = DAMAGE[damage]
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(change(raw))
    capsys.readouterr()
    assert main(["search", str(folder), "cat"]) == 1
    says(capsys.readouterr().err, name, "missing", "altered")
    sign(folder)
    assert main(["search", str(folder), "cat"]) == 1
    told = capsys.readouterr().err
    says(told, name if "number" not in damage and "texts" not in damage else ".arrow", "cut off", "altered")
    assert told.count("\n") == 1


SIZE, ROWS = 16, 40


@pytest.fixture
def embedded_lines(tmp_path):
    lines = "".join(f"word{number} and more\n" for number in range(ROWS))
    return embed_lines(tmp_path, lines, f"hashed-words:{SIZE}")


@pytest.fixture
def index(embedded_lines, tmp_path):
    build_index(embedded_lines, tmp_path / "index")
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


def columns(texts):
    return [[0] * len(texts), texts, texts, texts]


def offsets(last):
    """A file whose last offsets lead where there is no text."""
    start = np.zeros(ROWS, np.int32).tobytes()
    raw = ipc(SCHEMA, *columns([*[""] * (ROWS - 1), "8 bytes."]))
    wide, narrow = start * 2 + b"\x08" + bytes(7), start + b"\x08" + bytes(3)
    assert (raw.count(wide), raw.count(narrow)) == (1, 3)
    return raw.replace(wide, start * 2 + np.int64(last).tobytes()).replace(narrow, start + np.int32(last).tobytes())


SCHEMA = pa.schema([("record", pa.int64()), ("text", pa.large_string()), ("id", pa.string()), ("source", pa.string())])
TEXT_DAMAGE = {
    "cut off": lambda raw: raw[:-40],
    "empty": lambda _: b"",
    "offsets beyond": lambda _: offsets(2**31 - 1),
    "offsets back": lambda _: offsets(-(2**20)),
    "other columns": lambda _: ipc(pa.schema([("text", pa.int64())]), range(ROWS)),
    "fewer rows": lambda _: ipc(SCHEMA, *columns(["x"])),
    "compressed": lambda _: ipc(SCHEMA, *columns(["x" * 500_000] * ROWS), compression="zstd"),
    "no text": lambda raw: raw.replace(b"word1 ", b"w\xff\xfe\xff1 "),
}


@pytest.mark.parametrize("damage", TEXT_DAMAGE)
def test_altered_texts_are_refused(index, damage, capsys):
    path = index / "texts.arrow"
    path.write_bytes(TEXT_DAMAGE[damage](path.read_bytes()))
    sign(index)
    assert main(["search", str(index), "word1"]) == 1
    says(capsys.readouterr().err, "texts.arrow", "cut off", "altered", "`declutr index`")


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"version": 2}', b"[" * 100_000])
def test_a_damaged_list_of_contents_is_told_in_one_line(index, embedded_lines, raw, capsys):
    for path, command in (
        (index / "index.json", ["search", str(index), "word1"]),
        (
            embedded_lines.with_name("out.npy.json"),
            ["index", str(embedded_lines), "--output", str(index.with_name("other"))],
        ),
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
def test_embeddings_that_are_not_finite_are_not_indexed(embedded_lines, tmp_path, value):
    array = np.load(embedded_lines)
    array[3, 2] = value
    embedded_lines.write_bytes(npy(array))
    with pytest.raises(UsageError, match=all_of("row 3", "finite")):
        build_index(embedded_lines, tmp_path / "index", parquet=tmp_path / "map.parquet")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("in.txt", "out.npy", "out.npy.json")] == []


@pytest.mark.parametrize("array", [np.zeros((80, 8), np.float32), np.zeros((20, 32), np.float32)])
def test_embeddings_of_another_shape_are_not_indexed(embedded_lines, tmp_path, array):
    assert len(npy(array)) == embedded_lines.stat().st_size  # the note would not tell
    embedded_lines.write_bytes(npy(array))
    with pytest.raises(UsageError, match=all_of("float32", "(40, 16)")):
        build_index(embedded_lines, tmp_path / "index")


def test_a_query_without_a_known_word_is_near_to_nothing(index, capsys):
    assert main(["search", str(index), " "]) == 1
    says(capsys.readouterr().err, "empty")


def test_an_encoder_that_gives_no_numbers_is_named(tmp_path, capsys):
    model = static_folder(tmp_path / "words", {"cat": [np.nan, 1], "dog": [1e6, 1]})
    (tmp_path / "in.txt").write_text("cat\n")
    (tmp_path / "half.txt").write_text("dog\n")
    (tmp_path / "both.txt").write_text("dog\ncat\n")
    for texts, dtype, record in (("in.txt", "float32", 0), ("half.txt", "float16", 0), ("both.txt", "int8", 1)):
        given, output = ["embed", str(model), str(tmp_path / texts), "--dtype", dtype], tmp_path / "o.npy"
        assert main([*given, "--output", str(output)]) == 1
        says(capsys.readouterr().err, f"record {record}", "not finite")
        assert not output.exists()
