"""The commands around training, on what the real commands made: inspect, embed, verify-gradients, demo's pieces."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tinyruns as runs
from messages import says
from sentence_transformers import SentenceTransformer

from declutr.cli.main import main
from declutr.cli.run_demo import COLUMNS, neighbours, table

TEXTS = ["ab cd", "", "one two three four five six seven " * 40, "x"]


@pytest.fixture(scope="module")
def export(finished):
    return finished / "run" / "export"


def test_embed_gives_what_sentence_transformers_gives(finished, export, tmp_path):
    """Of an export, of its run, and of the run's last checkpoint; other encoders are in tests/evaluation."""
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    expected = SentenceTransformer(str(export), device="cpu").encode(TEXTS)
    checkpoint = sorted((finished / "run/checkpoints").glob("step-*"))[-1]
    for number, model in enumerate((export, finished / "run", checkpoint)):
        output = tmp_path / f"{number}.npy"
        assert main(["embed", str(model), str(tmp_path / "in.txt"), "--output", str(output)]) == 0
        np.testing.assert_allclose(np.load(output, allow_pickle=False), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("missing.txt", None, "matches no file"),
        ("bad.txt", b"good\n\xff\xfe\n", ("bad.txt", "5")),
        ("bad.jsonl", b'{"text": "a"}\n{"text": 3}\n', ("bad.jsonl", "14")),
        ("field.parquet", None, "--text-field"),
        ("cut.parquet", b"PAR1", "cut.parquet"),
        ("odd.zzz", b"text", "--format"),
    ],
)
def test_embed_refuses_what_it_cannot_read_and_writes_nothing(tmp_path, capsys, source, content, message):
    if content is not None:
        (tmp_path / source).write_bytes(content)
    elif source == "field.parquet":
        pq.write_table(pa.table({"other": ["a"]}), tmp_path / source)
    given = [str(tmp_path / source), "--output", str(tmp_path / "out.npy")]
    assert main(["embed", "hashed-words:8", *given]) == 1
    says(capsys.readouterr().err, message)
    assert not (tmp_path / "out.npy").exists()


def test_inspect_explains_shards(data, capsys):
    assert main(["inspect", str(data), "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert "320 documents read" in shown
    assert "checksums as in the manifest" in shown
    assert len(re.findall(r"^- row \d+ \([0-9a-f]{32}, corpus.jsonl\): \d+ tokens\n    \S", shown, re.MULTILINE)) == 2


def test_why_finds_every_batch_that_a_run_logged(finished, capsys):
    for step in range(1, 9):
        assert main(["why", str(finished / "run"), "--step", str(step)]) == 0
        shown = capsys.readouterr().out
        assert "as the run logged it" in shown
        assert shown.count("anchor [") == 16
        assert shown.count("positive [") == 32
    assert main(["why", str(finished), "--step", "1"]) == 1
    assert "has no config.yaml" in capsys.readouterr().err


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
    says(capsys.readouterr().err, "encoder.safetensors", "truncated", "altered")


@pytest.mark.dist
def test_verify_gradients_of_a_users_configuration_passes(data, tmp_path, capsys):
    """Dropout and attention dropout on, a queue, 2 processes for 5 documents."""
    values = runs.train_values(data, tmp_path / "run", encoder={"dropout": 0.1}, objective={"queue_size": 16})
    config = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main(["verify-gradients", str(config), "--documents", "5", "--processes", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("float64") == shown.count("float32") == 5
    assert "APART" not in shown
    sharded = ["scaling.fsdp=true", "--documents", "2", "--processes", "3"]  # one without a document
    assert main(["verify-gradients", str(config), *sharded]) == 0
    shown = capsys.readouterr().out
    assert shown.count("        3 ") == 6
    assert "APART" not in shown
    assert main(["verify-gradients", str(config), "data=nowhere", "batch_documents=0"]) == 1


def test_demo_shows_its_table_and_neighbours(data, export):
    lines = list(table({name: dict.fromkeys(COLUMNS, 0.5) for name in ("untrained", "mlm_only", "declutr")}))
    assert lines[0].split()[2:6] == ["recall_at_1", "mrr", "distant_recall_at_1", "distant_mrr"]
    assert [line.split().count("0.500") for line in lines] == [0, 8, 8, 8]
    assert len({len(line) for line in lines}) == 1
    shown = list(neighbours(data, export))
    assert sum(line.startswith("- ") for line in shown) == 4
    assert sum(line.startswith("    ") for line in shown) == 8
