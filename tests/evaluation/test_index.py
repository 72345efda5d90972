"""`declutr index` and `declutr search`: what is nearest, by whose vectors, and what is refused."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from messages import all_of, says

from declutr.cli.main import main
from declutr.common.errors import UsageError
from declutr.embedding.build import build_index
from declutr.embedding.index import INDEX, SearchIndex, StoredVectors, best_rows
from declutr.encoders.loading import load_encoder

ANIMALS = ["the cat sat on the mat", "a dog barked", "the mat was red", "nobody knows the trouble", "cat cat mat"]


@pytest.fixture
def embedded(tmp_path):
    lines = "".join(json.dumps({"text": text, "name": f"n{place}"}) + "\n" for place, text in enumerate(ANIMALS))
    (tmp_path / "in.jsonl").write_text(lines)
    given = ["embed", "hashed-words:256", str(tmp_path / "in.jsonl"), "--id-field", "name", "--output"]
    assert main([*given, str(tmp_path / "out.parquet")]) == 0
    return tmp_path / "out.parquet"


def test_the_nearest_texts_are_shown_with_their_scores(embedded, tmp_path, capsys):
    assert main(["index", str(embedded), "--output", str(tmp_path / "index")]) == 0
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "cat on the mat", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    encoder = load_encoder("hashed-words:256")
    vectors = encoder.encode([*ANIMALS, "cat on the mat"])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = vectors[:-1] @ vectors[-1]
    expected = [
        f"{scores[place]:6.3f}  n{place}  {ANIMALS[place]}" for place in np.argsort(-scores, kind="stable")[:3].tolist()
    ]
    assert lines == expected
    assert lines[0].endswith("the cat sat on the mat")


def test_ten_texts_of_a_line_each_are_shown_below_each_of_several_queries(tmp_path, capsys):
    texts = [f"cat number{place}\nof the   mat" for place in range(12)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["embed", "hashed-words:64", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.npy")]) == 0
    build_index(tmp_path / "out.npy", tmp_path / "index")
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "s3://cat", "mat"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0], lines[11]) == (22, "# s3://cat", "# mat")
    assert all(line.endswith(" of the mat") and "  cat number" in line for line in lines if line[0] != "#")


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_texts_keep_where_they_come_from_and_vectors_their_rows(tmp_path, suffix):
    (tmp_path / "in").mkdir()
    for name, texts in (("a", ANIMALS[:3]), ("b", ANIMALS[3:])):
        (tmp_path / f"in/{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    output = tmp_path / f"out{suffix}"
    assert main(["embed", "hashed-words:32", str(tmp_path / "in"), "--output", str(output)]) == 0
    rows = [4, 0, 3]
    expected = load_encoder("hashed-words:32").encode([ANIMALS[row] for row in rows])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    build_index(output, tmp_path / "files")
    index = SearchIndex(tmp_path / "files")
    texts = [(text.source, text.text) for text in index.texts(range(5))]
    assert texts == list(zip([*["a.jsonl"] * 3, *["b.jsonl"] * 2], ANIMALS, strict=True))
    np.testing.assert_allclose(index.vectors(rows), expected, atol=1e-6)


def test_text_without_an_id_is_shown_with_the_number_of_its_record(tmp_path, capsys):
    """Also behind records that were skipped, in every unit of the inputs."""
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        lines = ["no json", *(json.dumps({"text": f"{name} {text}"}) for text in ANIMALS[:2])]
        (tmp_path / f"in/{name}.jsonl").write_text("\n".join(lines) + "\n")
    output = tmp_path / "out.parquet"
    given = ["embed", "hashed-words:64", str(tmp_path / "in"), "--output", str(output), "--skip-bad"]
    assert main([*given, "--unit-mib", "0.0001"]) == 0
    records = pq.read_table(output).column("row").to_pylist()
    assert records == [1, 2, 4, 5]
    build_index(output, tmp_path / "index")
    assert [text.record for text in SearchIndex(tmp_path / "index").texts(range(4))] == records
    capsys.readouterr()
    assert main(["search", str(tmp_path / "index"), "b the cat sat on the mat", "--top", "1"]) == 0
    assert capsys.readouterr().out.split()[1] == "4"


def test_another_encoder_and_altered_files_are_refused(embedded, tmp_path, capsys):
    build_index(embedded, tmp_path / "index")
    assert main(["search", str(tmp_path / "index"), "cat", "--model", "hashed-words@1:256"]) == 1
    says(capsys.readouterr().err, "hashed-words:256")
    assert main(["index", str(embedded), "--output", str(tmp_path / "index")]) == 1
    texts = tmp_path / "index/texts.arrow"
    texts.write_bytes(texts.read_bytes()[:-1] + b"x")
    with pytest.raises(UsageError, match=all_of("texts.arrow", "missing", "altered")):
        SearchIndex(tmp_path / "index")
    (tmp_path / "index" / INDEX).unlink()
    with pytest.raises(UsageError, match="not an index"):
        SearchIndex(tmp_path / "index")


def test_addresses_of_a_received_note_are_not_opened(embedded, tmp_path, capsys):
    note = embedded.with_name(f"{embedded.name}.json")
    values = json.loads(note.read_text())
    values["config"]["inputs"] = ["s3://bucket/in.jsonl?endpoint_override=http://127.0.0.1:9"]
    note.write_text(json.dumps(values))
    assert main(["index", str(embedded), "--output", str(tmp_path / "index")]) == 1
    says(capsys.readouterr().err, "s3://bucket", "--open-addresses")


def test_embed_overwrites_neither_input_nor_what_is_not_its_own(embedded, tmp_path, capsys):
    (tmp_path / "mine.npy").write_bytes(b"mine")
    given = ["embed", "hashed-words:8", str(tmp_path / "in.jsonl"), "--output"]
    assert main([*given, str(tmp_path / "mine.npy")]) == 1
    says(capsys.readouterr().err, "mine.npy", "not of `declutr embed`")
    assert (tmp_path / "mine.npy").read_bytes() == b"mine"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.parquet").write_bytes(embedded.read_bytes())
    for inside in ("texts/a.parquet", "texts/new.parquet", "in.jsonl"):
        assert main([*given[:2], str(tmp_path / inside.partition("/")[0]), "--output", str(tmp_path / inside)]) == 1
        says(capsys.readouterr().err, "is in the input")


@pytest.mark.parametrize(
    ("pattern", "output", "more", "status"),
    [
        ("*.*", "new.parquet", [], 1),
        ("**/*.parquet", "new.parquet", [], 1),
        ("**/*.parquet", "deep/er/new.parquet", [], 1),
        ("../link/*.parquet", "new.parquet", [], 1),
        ("*.json*", "new.npy", ["--format", "jsonl"], 1),
        ("", "new.npy", ["--format", "jsonl"], 1),
        ("*.jsonl", "new.parquet", [], 0),
        ("*.*", "new.npy", [], 0),
        ("*.*", "deep/new.parquet", [], 0),
        ("a[[]1].*", "a[1].parquet", [], 1),
        ("a[1].jsonl", "a1.parquet", [], 0),
    ],
)
def test_output_that_a_later_command_would_read_as_an_input_is_refused(tmp_path, capsys, pattern, output, more, status):
    """Otherwise `index` would find other inputs than those embedded."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    for name in ("a[1].jsonl", "b.jsonl"):
        (folder / name).write_text('{"text": "a cat"}\n')
    target = folder / output
    given = ["embed", "hashed-words:8", str(folder / pattern), "--output", str(target), *more]
    assert main(given) == status
    if status:
        says(capsys.readouterr().err, "--output", output, "is in the input")
        assert not target.exists()
    else:
        assert build_index(target, tmp_path / "index").rows == (2 if pattern[0] == "*" else 1)


def test_changed_inputs_are_not_indexed(embedded, tmp_path):
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write('{"text": "more", "name": "n5"}\n')
    with pytest.raises(UsageError, match="have changed"):
        build_index(embedded, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_rows_with_equal_scores_are_in_order_and_nan_is_last(tmp_path):
    """As a stable sort of all scores gives them, also for as many texts as there are and for more."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-2, 3, (500, 3)).astype(np.float32)
    vectors[7] = np.inf  # its cosines are infinite or NaN
    np.save(tmp_path / "vectors.npy", np.where(np.isinf(vectors), 3e38, vectors))
    stored = StoredVectors(tmp_path / "vectors.npy", 500, 3, "float32")
    with np.errstate(over="ignore", invalid="ignore"):
        for scores in stored.cosines(np.array([[1, 1, 0], [9, -9, 9]], np.float32)):
            for top in (1, 10, 499, 500, 501):
                expected = np.argsort(-scores, kind="stable")[:top]
                np.testing.assert_array_equal(best_rows(scores, top), expected)


def test_index_with_the_graphs_of_an_earlier_version_is_refused_with_the_remedy(embedded, tmp_path, capsys):
    build_index(embedded, tmp_path / "index")
    path = tmp_path / "index" / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kind": "graph"}))
    assert main(["search", str(tmp_path / "index"), "cat"]) == 1
    says(capsys.readouterr().err, "kind", "'graph'", "`declutr index EMBEDDINGS --output FOLDER`")
