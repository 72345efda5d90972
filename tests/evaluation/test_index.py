"""`declutr index` and `declutr search`: the nearest, int8, the file for Embedding Atlas, refusals."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from encoderfiles import keys
from folders import embed_rows, jsonl
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.embedding.build import PLANE_ROWS, SHARE, fit_plane, sample_rows
from declutr.embedding.build import index as build_index
from declutr.embedding.index import INDEX, SearchIndex, StoredVectors, best_rows
from declutr.embedding.units import Shape, shaped
from declutr.encoders.loading import load_encoder

ANIMALS = ["the cat sat on the mat", "a dog barked", "the mat was red", "nobody knows the trouble", "cat cat mat"]


@pytest.fixture
def embedded(tmp_path):
    rows = [{"text": text, "name": f"n{place}"} for place, text in enumerate(ANIMALS)]
    return embed_rows(tmp_path, rows, "--id-field", "name", encoder="hashed-words:256", suffix=".parquet")


def unit_vectors(folder):
    vectors = np.load(folder / "vectors.npy").astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def test_the_nearest_texts_are_shown_with_their_scores_below_each_of_several_queries(embedded, tmp_path, capsys):
    assert main(["index", str(embedded), "--output", str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "cat on the mat", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    vectors = load_encoder("hashed-words:256").encode([*ANIMALS, "cat on the mat"])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = vectors[:-1] @ vectors[-1]
    places = np.argsort(-scores, kind="stable")[:3].tolist()
    assert lines == [f"{scores[place]:6.3f}  n{place}  {ANIMALS[place]}" for place in places]
    assert lines[0].endswith("the cat sat on the mat")
    texts, many = [f"cat number{place}\nof the   mat" for place in range(12)], tmp_path / "many"
    many.mkdir()
    build_index(embed_rows(many, texts), many / "index")
    capsys.readouterr()
    assert main(["search", str(many / "index"), "s3://cat", "mat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0], lines[11]) == (22, "# s3://cat", "# mat")
    assert all(line.endswith(" of the mat") and "  cat number" in line for line in lines if line[0] != "#")


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_texts_keep_where_they_come_from_and_vectors_their_rows(tmp_path, capsys, suffix):
    """By file, or by a field of theirs; a text without that field falls back to its file."""
    (tmp_path / "in").mkdir()
    for name, texts in (("a", ANIMALS[:3]), ("b", ANIMALS[3:])):
        lines = [{"text": text} | ({"kind": f"{name}{len(text)}"} if "cat" in text else {}) for text in texts]
        jsonl(tmp_path / f"in/{name}.jsonl", lines)
    (tmp_path / "in/c.md").write_text("# a page")
    output = tmp_path / f"out{suffix}"
    assert main(["embed", "hashed-words:32", str(tmp_path / "in"), "--output", str(output)]) == 0
    rows = [4, 0, 3]
    expected = load_encoder("hashed-words:32").encode([ANIMALS[row] for row in rows])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert main(["index", str(output), "--output", str(tmp_path / "kinds"), "--source-field", "kind"]) == 0
    texts = [(text.source, text.number, text.text) for text in SearchIndex(tmp_path / "kinds").texts(range(6))]
    says(capsys.readouterr().err, "--source-field kind: 4 of 6 texts have none of that name")
    places = [("a22", None), ("a.jsonl", 2), ("a.jsonl", 3), ("b.jsonl", 1), ("b11", None), ("c.md", 1)]
    assert texts == [(*place, text) for place, text in zip(places, [*ANIMALS, "# a page"], strict=True)]
    np.testing.assert_allclose(unit_vectors(tmp_path / "kinds")[rows], expected, atol=1e-6)
    build_index(output, tmp_path / "files")
    assert [text.source for text in SearchIndex(tmp_path / "files").texts([0, 4])] == ["a.jsonl", "b.jsonl"]


def test_text_without_an_id_is_shown_with_its_file_and_its_number_there(tmp_path, capsys):
    """Also behind records that were skipped, in every unit of the inputs."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        lines = ["no json", *(json.dumps({"text": f"{name} {text}"}) for text in ANIMALS[:2])]
        (tmp_path / f"in/{name}.jsonl").write_text("\n".join(lines) + "\n")
    output, place = tmp_path / "out.parquet", str(tmp_path / "index")
    words = ["embed", "hashed-words:64", str(tmp_path / "in"), "--output", str(output), "--skip-bad"]
    assert main([*words, "--unit-mib", "0.0001"]) == 0
    records = pq.read_table(output).column("row").to_pylist()
    assert records == [1, 2, 4, 5]
    build_index(output, tmp_path / "index")
    assert [text.record for text in SearchIndex(tmp_path / "index").texts(range(4))] == records
    capsys.readouterr()
    assert main(["search", place, "b the cat sat on the mat", "--top", "1"]) == 0
    says(capsys.readouterr().out, "b.jsonl text 2  b the cat sat on the mat")


def test_other_encoders_folders_addresses_files_and_inputs_are_refused(embedded, tmp_path, capsys, refused):
    index = ["index", str(embedded), "--output", str(tmp_path / "index")]
    build_index(embedded, tmp_path / "index")
    refused(["search", tmp_path / "index", "cat", "--model", "hashed-words@1:256"], "hashed-words:256")
    assert main(index) == 1
    (tmp_path / "index" / INDEX).unlink()
    with pytest.raises(UsageError, match="not an index"):
        SearchIndex(tmp_path / "index")
    (tmp_path / "mine.npy").write_bytes(b"mine")
    assert main(["embed", "hashed-words:8", str(tmp_path / "in"), "--output", str(tmp_path / "mine.npy")]) == 1
    says(capsys.readouterr().err, "mine.npy exists without its note")
    assert (tmp_path / "mine.npy").read_bytes() == b"mine"
    note = embedded.with_name(f"{embedded.name}.json")
    whole = note.read_text()
    address = "s3://bucket/in.jsonl?endpoint_override=http://127.0.0.1:9"
    keys(note.name, config=json.loads(whole)["config"] | {"inputs": [address]})(tmp_path)
    refused([*index[:-1], tmp_path / "other"], "s3://bucket", "--open-addresses")
    note.write_text(whole)
    with (tmp_path / "in/a.jsonl").open("a") as stream:
        stream.write('{"text": "more", "name": "n5"}\n')
    with pytest.raises(UsageError, match="have changed"):
        build_index(embedded, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("pattern", "output", "more", "status"), [
    ("*.*", "new.parquet", [], 1), ("**/*.parquet", "new.parquet", [], 1),
    ("**/*.parquet", "deep/er/new.parquet", [], 1), ("../link/*.parquet", "new.parquet", [], 1),
    *[(pattern, "new.npy", ["--format", "jsonl"], 1) for pattern in ("*.json*", "")],
    ("", "new.parquet", [], 1), ("b.jsonl", "b.jsonl", [], 1), ("*.jsonl", "new.parquet", [], 0),
    ("*.*", "new.npy", [], 0), ("*.*", "deep/new.parquet", [], 0), ("a[[]1].*", "a[1].parquet", [], 1),
    ("a[1].jsonl", "a1.parquet", [], 0),
])  # fmt: skip
def test_output_that_a_later_command_would_read_as_an_input_is_refused(tmp_path, capsys, pattern, output, more, status):
    """Otherwise `index` would find other inputs than those embedded."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for name in ("a[1].jsonl", "b.jsonl"):
        (folder / name).write_text('{"text": "a cat"}\n')
    words = ["embed", "hashed-words:8", str(folder / pattern), "--output", str(folder / output), *more]
    assert main(words) == status
    if status:
        says(capsys.readouterr().err, "--output", output, "is inside the input")
        assert {path.name for path in folder.iterdir()} == {"a[1].jsonl", "b.jsonl"}
    else:
        assert build_index(folder / output, tmp_path / "index").facts.rows == (2 if pattern[0] == "*" else 1)


def test_rows_with_equal_scores_are_in_order_and_nan_is_last(tmp_path):
    """As a stable sort of all scores gives them, also for as many texts as there are and for more."""
    vectors = np.random.default_rng(0).integers(-2, 3, (500, 3)).astype(np.float32)
    vectors[7] = np.inf  # its cosines are infinite or NaN
    np.save(tmp_path / "vectors.npy", np.where(np.isinf(vectors), 3e38, vectors))
    stored = StoredVectors(tmp_path / "vectors.npy", 500, 3, "float32")
    with np.errstate(over="ignore", invalid="ignore"):
        for scores in stored.cosines(np.array([[1, 1, 0], [9, -9, 9]], np.float32)):
            for top in (1, 10, 499, 500, 501):
                np.testing.assert_array_equal(best_rows(scores, top), np.argsort(-scores, kind="stable")[:top])


ENCODER = "hashed-words:64"


def embed_words(folder, *options, suffix=".npy"):
    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    texts = [" ".join(rng.choice(words, 10)) for _ in range(600)]
    return embed_rows(folder, texts, *options, encoder=ENCODER, suffix=suffix)


def test_int8_keeps_the_direction_and_scales_each_row_to_127():
    rows = np.array([[0.5, -1, 0.25], [1e-20, 0, -2e-20], [0, 0, 0], [3e38, 1e38, 0]], np.float32)
    expected = [[64, -127, 32], [64, 0, -127], [0, 0, 0], [127, 42, 0]]
    found = shaped(rows, Shape(dtype="int8"))
    assert found.dtype == np.int8
    assert found.tolist() == expected
    np.testing.assert_array_equal(shaped(found.astype(np.float32) / 7, Shape(dtype="int8")), found)


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_index_of_int8_embeddings_keeps_them(tmp_path, capsys, suffix):
    output = embed_words(tmp_path, "--dtype", "int8", suffix=suffix)
    says(capsys.readouterr().out, "600 embeddings", "int8")
    assert main(["index", str(output), "--output", str(tmp_path / "index")]) == 0
    says(capsys.readouterr().out, "vectors", "int8", "float32")
    index = SearchIndex(tmp_path / "index")
    assert index.facts.dtype == "int8"
    vectors = load_encoder(ENCODER).encode([text.text for text in index.texts(range(600))])
    rows = shaped(vectors, Shape(dtype="int8")).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(unit_vectors(tmp_path / "index"), rows, atol=1e-6)
    unrounded = vectors[5] / np.linalg.norm(vectors[5])
    np.testing.assert_allclose(index.embed(load_encoder(ENCODER), index.texts([5])[0].text), unrounded, atol=1e-6)
    if suffix == ".npy":
        np.testing.assert_array_equal(np.load(output), shaped(vectors, Shape(dtype="int8")))


def test_int8_index_is_a_quarter_the_same_every_time_and_scored_by_queries_that_are_not_rounded(tmp_path):
    output = embed_words(tmp_path)
    for dtype in ("float32", "int8"):
        build_index(output, tmp_path / dtype, dtype=dtype)
    sizes = [(tmp_path / dtype / "vectors.npy").stat().st_size for dtype in ("float32", "int8")]
    assert sizes[0] - sizes[1] == 3 * 600 * 64
    hybrid = [build_index(output, tmp_path / name, dtype="int8", hybrid=True) for name in "ab"]
    assert hybrid[0] == hybrid[1]
    index, exact = SearchIndex(tmp_path / "int8"), SearchIndex(tmp_path / "float32")
    rounded, queries = unit_vectors(tmp_path / "int8"), unit_vectors(tmp_path / "float32")
    for row in range(0, 600, 7):
        hits, exact_hits = (side.hits(queries[row], 10, "") for side in (index, exact))
        cosines = [hit.cosine for hit in hits]
        np.testing.assert_allclose(cosines, rounded[[hit.row for hit in hits]] @ queries[row], atol=1e-6)
        assert cosines == sorted(cosines, reverse=True)
        assert hits[0].row == row
        np.testing.assert_allclose(cosines, [hit.cosine for hit in exact_hits], atol=0.01)


HOSTILE = (
    "<script>document.title='run'</script> &amp; \u202eright to left\u202c \x01\x1b[31m \x9b \u2066 {} 'quoted'"
    " \N{FOX FACE}" + "long" * 200
)
MAP_TEXTS = [f"{animal} {verb} on the mat" for animal in ("cat", "dog", "hen") for verb in ("sat", "ate", "ran")]
MAP_TEXTS += [HOSTILE, "a zebra", "-----", "cat " * 400]  # a text without a word has a null vector


def embedded_texts(folder, *options, texts=MAP_TEXTS, suffix=".npy"):
    rows = [{"text": text, "key": f"k{number}"} for number, text in enumerate(texts)]
    return embed_rows(folder, rows, *options, encoder="hashed-words:16", suffix=suffix)


def stored(output):
    return np.load(output) if output.suffix == ".npy" else np.stack(pq.read_table(output)["embedding"].to_numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("suffix", "options"), [(".npy", []), (".parquet", ["--id-field", "key"])])
def test_map_has_texts_vectors_and_places(tmp_path, capsys, dtype, suffix, options):
    output = embedded_texts(tmp_path, "--dtype", dtype, *options, suffix=suffix)
    file = tmp_path / "new folder/map.parquet"
    assert main(["index", str(output), "--output", str(tmp_path / "index"), "--parquet", str(file)]) == 0
    table = pq.read_table(file)
    share = float(table.schema.metadata[SHARE])
    says(capsys.readouterr().out, f"'{file}' --text text --x x --y y", f"{100 * share:.1f}% of the variance")
    assert table.column_names == ["text", "id", "source", "vector", "x", "y"]
    assert table["text"].to_pylist() == MAP_TEXTS
    assert table["id"].to_pylist() == [f"k{number}" if options else None for number in range(len(MAP_TEXTS))]
    assert set(table["source"].to_pylist()) == {"a.jsonl"}
    vectors = np.stack(table["vector"].to_numpy())
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, stored(output))
    units = vectors.astype(np.float64)
    units /= np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-12)
    _, values, directions = np.linalg.svd(units - units.mean(axis=0), full_matrices=False)
    axes = np.array([axis * np.sign(axis[np.abs(axis).argmax()]) for axis in directions[:2]]).T  # no sign is arbitrary
    places = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
    assert places.dtype == np.float32
    assert np.isfinite(places).all()
    np.testing.assert_allclose(places, (units - units.mean(axis=0)) @ axes, atol=1e-5)
    assert share == pytest.approx((values[:2] ** 2).sum() / (values**2).sum(), abs=1e-5)


def test_map_of_many_texts_is_fitted_to_some_and_is_the_same_every_time(tmp_path):
    """More than fit the plane, and more than are in a batch of the vectors or a part of the texts."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 90, 6)) for _ in range(PLANE_ROWS + 300)]
    output = embedded_texts(tmp_path, "--unit-mib", "0.02", texts=texts, suffix=".parquet")
    for name in "ab":
        build_index(output, tmp_path / name, parquet=tmp_path / f"{name}.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["text"].to_pylist() == texts
    np.testing.assert_array_equal(np.stack(table["vector"].to_numpy()), stored(output))
    units = unit_vectors(tmp_path / "a")
    rows = sample_rows(len(texts))
    assert len(set(rows.tolist())) == PLANE_ROWS
    np.testing.assert_array_equal(rows, np.sort(rows))
    mean, axes, _ = fit_plane(units[rows])
    np.testing.assert_allclose(np.stack([table["x"], table["y"]], axis=1), (units - mean) @ axes, atol=1e-6)
    for equal in (np.ones((1, 1)), np.ones((1, 30)), np.ones((30, 4)), np.zeros((3, 9))):  # they have one place
        mean, axes, share = fit_plane(equal.astype(np.float32))
        assert share == 1
        assert not ((equal - mean) @ axes).any()


def test_map_in_a_place_that_is_in_use_or_of_no_text_is_refused(tmp_path, refused):
    output = embedded_texts(tmp_path, suffix=".parquet")
    before = output.read_bytes()
    for name, words in (
        ("map.csv", "must end in .parquet"), ("out.parquet", "exists already"),
        ("index/map.parquet", "folder of the index"), ("in/map.parquet", "is inside the input"),
    ):  # fmt: skip
        command = ["index", str(output), "--output", str(tmp_path / "index"), "--parquet", str(tmp_path / name)]
        refused(command, "--parquet", name, words)
        assert output.read_bytes() == before
        assert {path.name for path in tmp_path.iterdir()} == {"in", "out.parquet", "out.parquet.json"}
    (tmp_path / "none").mkdir()
    bad = embed_rows(tmp_path / "none", [{}], "--skip-bad", suffix=".parquet")
    with pytest.raises(UsageError, match=all_of("--parquet", "no text")):
        build_index(bad, tmp_path / "index", parquet=tmp_path / "map.parquet")
