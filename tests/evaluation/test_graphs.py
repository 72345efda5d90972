"""Graphs of vectors of which many are nearly equal: complete, and the same however many threads build them."""

import numpy as np
import pytest

from declutr.embedding.graphs import Graphs, write_graphs

ROWS, SIZE = 3000, 64


@pytest.fixture(scope="module")
def vectors():
    """Sums of 8 of 12 neighbouring words' vectors, as of texts with few words."""
    rng = np.random.default_rng(0)
    words = rng.standard_normal((200, SIZE))
    found = np.stack([words[topic + rng.integers(0, 12, 8)].sum(0) for topic in rng.integers(0, 188, ROWS)])
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def build(folder, vectors, threads, part_rows=700, chunk_rows=101):
    folder.mkdir()
    told = []
    write_graphs(folder, SIZE, np.split(vectors, range(chunk_rows, ROWS, chunk_rows)), told.append, part_rows, threads)
    assert sum(told) == ROWS
    return sorted(folder.iterdir())


def test_the_number_of_threads_changes_no_byte(vectors, tmp_path):
    one, four = (build(tmp_path / str(threads), vectors, threads) for threads in (1, 4))
    assert [path.name for path in one] == [f"graph-{number:05d}.usearch" for number in range(5)]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in four]


def test_every_vector_finds_itself_and_what_is_nearest_to_it(vectors, tmp_path):
    graphs = Graphs(build(tmp_path / "graphs", vectors, 2), SIZE)
    rows, scores = graphs.nearest(vectors, 10)
    exact = -np.sort(-(vectors @ vectors.T), axis=1)[:, :10]
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
    assert (scores >= exact[:, -1:] - 1e-5).mean() > 0.999
    np.testing.assert_allclose(np.einsum("qd,qtd->qt", vectors, vectors[rows]), scores, atol=1e-5)
    some = [2999, 0, 700, 699]
    np.testing.assert_array_equal(graphs.vectors(some), vectors[some])


def test_an_error_ends_what_was_begun(vectors, tmp_path):
    def told(_):
        raise OSError("nobody reads the bar any more")

    with pytest.raises(OSError, match="any more"):
        write_graphs(tmp_path, SIZE, [vectors[:1500]], told, part_rows=1200, threads=2)
    assert not list(tmp_path.iterdir())
