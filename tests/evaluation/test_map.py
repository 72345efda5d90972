"""`declutr index --parquet`: the file for Embedding Atlas has every text, its vector, and its place on the plane."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.embedding.build import build_index
from declutr.embedding.index import SearchIndex
from declutr.embedding.plane import PLANE_ROWS, SHARE, fit_plane, sample_rows

HOSTILE = (
    "<script>document.title='run'</script> &amp; \u202eright to left\u202c \x00\x1b[31m \x9b \u2066 {} 'quoted'"
    " \N{FOX FACE}" + "long" * 200
)
TEXTS = [f"{animal} {verb} on the mat" for animal in ("cat", "dog", "hen") for verb in ("sat", "ate", "ran")]
TEXTS += [HOSTILE, "a zebra", "-----", "cat " * 400]  # a text without a word has a null vector


def embedded(folder, *options, texts=TEXTS, suffix=".npy"):
    (folder / "in").mkdir()
    rows = [{"text": text, "key": f"k{number}"} for number, text in enumerate(texts)]
    (folder / "in/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = folder / f"out{suffix}"
    assert main(["embed", "hashed-words:16", str(folder / "in"), "--output", str(output), *options]) == 0
    return output


def stored(output):
    return np.load(output) if output.suffix == ".npy" else np.stack(pq.read_table(output)["embedding"].to_numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("suffix", "options"), [(".npy", []), (".parquet", ["--id-field", "key"])])
def test_map_has_texts_vectors_and_places(tmp_path, capsys, dtype, suffix, options):
    output, file = embedded(tmp_path, "--dtype", dtype, *options, suffix=suffix), tmp_path / "new folder/map.parquet"
    command = ["index", str(output), "--output", str(tmp_path / "index")]
    assert main([*command, "--parquet", str(file)]) == 0
    table = pq.read_table(file)
    share = float(table.schema.metadata[SHARE])
    says(capsys.readouterr().out, f"'{file}' --text text --x x --y y", f"{100 * share:.1f}% of the variance")
    assert table.column_names == ["text", "id", "source", "vector", "x", "y"]
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [f"k{number}" if options else None for number in range(len(TEXTS))]
    assert set(table["source"].to_pylist()) == {"a.jsonl"}
    vectors = np.stack(table["vector"].to_numpy())
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(vectors, stored(output))
    units = vectors.astype(np.float64)
    units /= np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-12)
    left, values, _ = np.linalg.svd(units - units.mean(axis=0), full_matrices=False)
    places = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
    assert places.dtype == np.float32
    assert np.isfinite(places).all()
    np.testing.assert_allclose(np.abs(places), np.abs(left[:, :2] * values[:2]), atol=1e-5)
    assert share == pytest.approx((values[:2] ** 2).sum() / (values**2).sum(), abs=1e-5)


def test_map_of_many_texts_is_fitted_to_some_and_is_the_same_every_time(tmp_path):
    """More than fit the plane, and more than are in a batch of the vectors or a part of the texts."""
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 90, 6)) for _ in range(PLANE_ROWS + 300)]
    output = embedded(tmp_path, "--unit-mib", "0.02", texts=texts, suffix=".parquet")
    for name in "ab":
        build_index(output, tmp_path / name, map_file=tmp_path / f"{name}.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["text"].to_pylist() == texts
    np.testing.assert_array_equal(np.stack(table["vector"].to_numpy()), stored(output))
    units = SearchIndex(tmp_path / "a").vectors(range(len(texts)))
    rows = sample_rows(len(texts), PLANE_ROWS)
    assert len(set(rows.tolist())) == PLANE_ROWS
    np.testing.assert_array_equal(rows, np.sort(rows))
    places = fit_plane(units[rows]).place(units)
    np.testing.assert_allclose(np.stack([table["x"], table["y"]], axis=1), places, atol=1e-6)


def test_plane_is_that_of_the_covariance_and_does_not_turn_round():
    rng = np.random.default_rng(0)
    base = rng.standard_normal((60, 5)) * [5, 3, 1, 0.5, 0.1]
    for size in (5, 200):  # fewer numbers than texts, and more
        turn = np.linalg.qr(rng.standard_normal((size, size)))[0][:5]
        vectors = (base @ turn + 1).astype(np.float32)
        plane = fit_plane(vectors)
        np.testing.assert_allclose(plane.axes.T @ plane.axes, np.eye(2), atol=1e-6)
        values, columns = np.linalg.eigh(np.cov(vectors.T.astype(np.float64), bias=True))
        for axis, column in zip(plane.axes.T, columns.T[:-3:-1], strict=True):
            np.testing.assert_allclose(np.abs(axis), np.abs(column), atol=1e-4)
            assert axis[np.abs(axis).argmax()] > 0
        assert plane.share == pytest.approx(values[-2:].sum() / values.sum(), abs=1e-6)
        np.testing.assert_allclose(fit_plane(vectors[::-1]).axes, plane.axes, atol=1e-6)


@pytest.mark.parametrize("vectors", [np.ones((1, 1)), np.ones((1, 30)), np.ones((30, 4)), np.zeros((3, 9))])
def test_plane_of_equal_vectors_has_one_place(vectors):
    plane = fit_plane(vectors.astype(np.float32))
    assert plane.share == 1
    np.testing.assert_array_equal(plane.place(vectors.astype(np.float32)), np.zeros((len(vectors), 2)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("map.csv", "must end in .parquet"),
        ("out.parquet", "exists already"),
        ("index/map.parquet", "folder of the index"),
        ("in/map.parquet", "is in the input"),
    ],
)
def test_map_in_a_place_that_is_in_use_is_refused(tmp_path, capsys, name, words):
    output = embedded(tmp_path, suffix=".parquet")
    before = output.read_bytes()
    command = ["index", str(output), "--output", str(tmp_path / "index"), "--parquet", str(tmp_path / name)]
    assert main(command) == 1
    says(capsys.readouterr().err, "--parquet", name, words)
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out.parquet", "out.parquet.json"}


def test_map_of_no_text_is_refused(tmp_path):
    with pytest.raises(UsageError, match=all_of("--parquet", "no text")):
        build_index(embedded(tmp_path, texts=[]), tmp_path / "index", map_file=tmp_path / "map.parquet")
