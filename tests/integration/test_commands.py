"""The commands around training, on what the real commands made: inspect, embed, verify-gradients, demo's pieces."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tinyruns as runs
from sentence_transformers import SentenceTransformer

from evaluation.cli import main
from evaluation.demo import neighbours, table

TEXTS = ["ab cd", "", "one two three four five six seven " * 40, "x"]


@pytest.fixture(scope="module")
def export(finished):
    return finished / "run" / "export"


@pytest.fixture(scope="module")
def expected(export):
    return SentenceTransformer(str(export), device="cpu").encode(TEXTS)


def write_inputs(folder):
    (folder / "in.txt").write_text("\n".join(TEXTS) + "\n")
    (folder / "in.jsonl").write_text("".join(json.dumps({"sentence": text}) + "\n" for text in TEXTS))
    pq.write_table(pa.table({"sentence": TEXTS}), folder / "in.parquet")


@pytest.mark.parametrize("source", ["in.txt", "in.jsonl", "in.parquet"])
@pytest.mark.parametrize("output", ["out.npy", "out.parquet"])
def test_embed_gives_what_sentence_transformers_gives(export, expected, tmp_path, source, output):
    write_inputs(tmp_path)
    given = [str(export), str(tmp_path / source), "--output", str(tmp_path / output), "--text-field", "sentence"]
    assert main(["embed", *given]) == 0
    if output.endswith("npy"):
        found = np.load(tmp_path / output, allow_pickle=False)
    else:
        read = pq.read_table(tmp_path / output)
        assert read.column("row").to_pylist() == [0, 1, 2, 3]
        found = np.array(read.column("embedding").to_pylist(), np.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("missing.txt", None, "no such file"),
        ("bad.txt", b"good\n\xff\xfe\n", "line 2"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n', "line 2"),
        ("field.jsonl", b'{"other": "a"}\n', "--text-field"),
        ("cut.parquet", b"PAR1", "cut.parquet"),
    ],
)
def test_embed_refuses_what_it_cannot_read_and_writes_nothing(export, tmp_path, capsys, source, content, message):
    if content is not None:
        (tmp_path / source).write_bytes(content)
    assert main(["embed", str(export), str(tmp_path / source), "--output", str(tmp_path / "out.npy")]) == 1
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {source}


def test_embed_names_a_wrong_output_and_a_wrong_model(export, tmp_path, capsys):
    write_inputs(tmp_path)
    assert main(["embed", str(export), str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.csv")]) == 1
    assert ".npy or .parquet" in capsys.readouterr().err
    assert main(["embed", str(tmp_path), str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]) == 1
    assert "cannot be loaded" in capsys.readouterr().err


def test_inspect_explains_shards_with_their_spans(data, capsys):
    assert main(["inspect", str(data), "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert "320 documents read" in shown
    assert "checksums as in the manifest" in shown
    assert shown.count("anchor ") == 4
    assert shown.count("positive ") == 8
    assert main(["inspect", str(data), "--documents", "2"]) == 0
    assert capsys.readouterr().out == shown  # the same spans, whenever
    assert main(["inspect", str(data), "--documents", "2", "--epoch", "1"]) == 0
    assert capsys.readouterr().out != shown


def test_inspect_explains_a_run_a_checkpoint_and_an_export(finished, capsys):
    run = finished / "run"
    checkpoint = sorted((run / "checkpoints").glob("step-*"))[-1]
    for path, words in ((run, "8 steps logged"), (checkpoint, "after step 8"), (run / "export", "after 8 steps")):
        assert main(["inspect", str(path)]) == 0
        assert words in capsys.readouterr().out
    assert main(["inspect", str(finished)]) == 1
    assert "no manifest" in capsys.readouterr().err


def test_inspect_names_a_damaged_checkpoint(copied, capsys):
    checkpoint = sorted((copied / "checkpoints").glob("step-*"))[-1]
    weights = checkpoint / "encoder.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert main(["inspect", str(checkpoint)]) == 1
    assert "encoder.safetensors is truncated or altered" in capsys.readouterr().err


@pytest.mark.dist
def test_verify_gradients_on_a_users_configuration(data, tmp_path, capsys):
    """Dropout and attention dropout on, a queue, 2 processes for 5 documents."""
    values = runs.train_values(data, tmp_path / "run", encoder={"dropout": 0.1}, objective={"queue_size": 16})
    config = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main(["verify-gradients", str(config), "--documents", "5", "--processes", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("float64") == shown.count("float32") == 5
    assert "APART" not in shown
    sharded = ["scaling.shard_parameters=true", "--documents", "2", "--processes", "3"]  # one without a document
    assert main(["verify-gradients", str(config), *sharded]) == 0
    shown = capsys.readouterr().out
    assert shown.count("        3 ") == 6
    assert "APART" not in shown
    assert main(["verify-gradients", str(config), "data=nowhere", "batch_documents=0"]) == 1


def test_the_demos_table_and_neighbours(data, export):
    columns = ("recall_at_1", "mrr", "alignment", "uniformity", "effective_rank", "seconds")
    lines = list(table({name: dict.fromkeys(columns, 0.5) for name in ("untrained", "mlm_only", "declutr")}))
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    shown = list(neighbours(data, export))
    assert sum(line.startswith("- ") for line in shown) == 4
    assert sum(line.startswith("    ") for line in shown) == 8
