"""int8 vectors in files of embeddings and indexes: rounding, size, recall, and the same bytes every time."""

import json

import numpy as np
import pytest
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.embedding.build import build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.units import Shape, shaped
from declutr.encoders.loading import load_encoder

ENCODER = "hashed-words:64"


def embed(tmp_path, *options, suffix=".npy", count=600):
    rng = np.random.default_rng(0)
    words = [f"w{number}" for number in range(300)]
    lines = [" ".join(rng.choice(words, 10)) for _ in range(count)]
    (tmp_path / "in.txt").write_text("\n".join(lines) + "\n")
    output = tmp_path / f"out{''.join(options)}{suffix}"
    assert main(["embed", ENCODER, str(tmp_path / "in.txt"), "--output", str(output), *options]) == 0
    return output


def test_int8_keeps_the_direction_and_scales_each_row_to_127():
    rows = np.array([[0.5, -1, 0.25], [1e-20, 0, -2e-20], [0, 0, 0], [3e38, 1e38, 0]], np.float32)
    expected = [[64, -127, 32], [64, 0, -127], [0, 0, 0], [127, 42, 0]]
    found = shaped(rows, Shape(dtype="int8"))
    assert found.dtype == np.int8
    assert found.tolist() == expected
    np.testing.assert_array_equal(shaped(found.astype(np.float32) / 7, Shape(dtype="int8")), found)


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_index_of_int8_embeddings_keeps_them(tmp_path, capsys, suffix):
    output = embed(tmp_path, "--dtype", "int8", suffix=suffix)
    says(capsys.readouterr().out, "600 embeddings", "int8")
    assert main(["index", str(output), "--output", str(tmp_path / "index")]) == 0
    says(capsys.readouterr().out, "vectors", "int8", "float32")
    index = SearchIndex(tmp_path / "index")
    assert index.facts.dtype == "int8"
    vectors = load_encoder(ENCODER).encode([text.text for text in index.texts(range(600))])
    rows = shaped(vectors, Shape(dtype="int8")).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(index.vectors([5, 0]), rows[[5, 0]], atol=1e-6)
    unrounded = vectors[5] / np.linalg.norm(vectors[5])
    np.testing.assert_allclose(index.embed(load_encoder(ENCODER), index.texts([5])[0].text), unrounded, atol=1e-6)
    if suffix == ".npy":
        np.testing.assert_array_equal(np.load(output), shaped(vectors, Shape(dtype="int8")))


def test_search_of_int8_scores_by_queries_that_are_not_rounded(tmp_path):
    output = embed(tmp_path)
    for dtype in ("float32", "int8"):
        build_index(output, tmp_path / dtype, dtype=dtype)
    index, exact = SearchIndex(tmp_path / "int8"), SearchIndex(tmp_path / "float32")
    queries = exact.vectors(list(range(0, 600, 7)))
    rows, cosines = index.nearest(queries, 10)
    for row, found, query in zip(rows, cosines, queries, strict=True):
        np.testing.assert_allclose(found, index.vectors(row.tolist()) @ query, atol=1e-6)
    assert (np.diff(cosines, axis=1) <= 0).all()
    assert (rows[:, 0] == np.arange(0, 600, 7)).all()
    np.testing.assert_allclose(cosines, exact.nearest(queries, 10)[1], atol=0.01)
    assert 0.95 < index.facts.recall <= 1
    assert exact.facts.recall is None


def test_recall_is_the_share_of_the_ten_nearest_that_is_found(tmp_path):
    output = embed(tmp_path)
    facts = build_index(output, tmp_path / "index", dtype="int8")
    vectors = np.load(output)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rounded = shaped(vectors, Shape(dtype="int8")).astype(np.float32)
    rounded /= np.linalg.norm(rounded, axis=1, keepdims=True)
    hits = []
    for row in np.unique(np.linspace(0, 599, 100).astype(int)):
        true, found = (np.delete(each @ vectors[row], row) for each in (vectors, rounded))
        chosen = np.argsort(-found, kind="stable")[:10]
        hits.append((true[chosen] >= np.sort(true)[-10] - 1e-6).mean())
    assert facts.recall == pytest.approx(np.mean(hits), abs=1e-9)


def test_int8_index_is_a_quarter_in_size_and_the_same_every_time(tmp_path):
    output = embed(tmp_path)
    made = [build_index(output, tmp_path / str(number), dtype="int8", lexical="idf") for number in (1, 2)]
    assert made[0] == made[1]
    build_index(output, tmp_path / "float32")
    sizes = [(tmp_path / folder / "vectors.npy").stat().st_size for folder in ("float32", "1")]
    assert sizes[0] - sizes[1] == 3 * 600 * 64


def test_embeddings_that_are_not_finite_are_not_rounded_to_int8(tmp_path, capsys):
    (tmp_path / "v.txt").write_text("cat nan 1\ndog 1e6 1\n")
    (tmp_path / "in.txt").write_text("dog\ncat\n")
    given = ["embed", str(tmp_path / "v.txt"), str(tmp_path / "in.txt"), "--output", str(tmp_path / "o.npy")]
    assert main([*given, "--dtype", "int8"]) == 1
    says(capsys.readouterr().err, "record 1", "not finite")
    assert not (tmp_path / "o.npy").exists()


def test_vectors_of_another_type_than_the_index_names_are_refused(tmp_path):
    build_index(embed(tmp_path, count=40), tmp_path / "index", dtype="int8")
    path = tmp_path / "index" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}))
    with pytest.raises(UsageError, match=all_of("vectors.npy")):
        SearchIndex(tmp_path / "index")


def test_index_of_one_text_has_no_recall(tmp_path):
    facts = build_index(embed(tmp_path, count=1), tmp_path / "index", dtype="int8")
    assert facts.recall is None
