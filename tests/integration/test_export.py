"""The exported folder as other libraries load it, and the commands around training on what the real ones made."""

import re
import shutil

import numpy as np
import pytest
import ray
import tinyruns as runs
import torch
from messages import says
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from tiny import declutr, tiny_train_step
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from declutr.cli.main import main
from declutr.cli.runs import COLUMNS, neighbours, table
from declutr.common.errors import CheckpointError
from declutr.common.storage import read_json
from declutr.encoders.loading import load_encoder
from declutr.trainer.build import build_encoder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import collect, load_parameters
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.train import train

TEXTS = ["", "a", "ab cd ef.", "one two three four " * 50, "\n\t ", "naïve façade ✓", "<mask> </s> in a text"]


def encoder_of(data, run, **changes):
    """Our own encoder with the weights of the run's last checkpoint."""
    config = runs.train_config(data, run, **changes)
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    encoder = build_encoder(config, tokenizer)
    path, _ = checkpoint.find_latest(run / "checkpoints")
    load_parameters(path, encoder)
    return encoder.eval(), tokenizer, path


def embed(encoder, tokenizer, texts):
    ids = tokenizer(texts, truncation=True, max_length=22)["input_ids"]  # 24 positions, RoBERTa's begin at 2
    lengths = torch.tensor([len(row) for row in ids])
    nothing = torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(torch.tensor([token for row in ids for token in row]), lengths, nothing, nothing)
    with torch.no_grad():
        return encoder.embed(batch).numpy()


def test_three_libraries_give_the_same_vectors(data, finished):
    export = finished / "run" / "export"
    encoder, tokenizer, path = encoder_of(data, finished / "run", **runs.FINISHED)
    ours = embed(encoder, tokenizer, TEXTS)
    theirs = SentenceTransformer(str(export), device="cpu").encode(TEXTS)
    assert ours.shape == theirs.shape == (len(TEXTS), 32)
    np.testing.assert_allclose(theirs, ours, atol=1e-5, rtol=0)
    for folder in (export, finished / "run", path):
        np.testing.assert_allclose(load_encoder(str(folder), device="cpu").encode(TEXTS), ours, atol=1e-5, rtol=0)
    assert np.linalg.norm(ours[1] - ours[3]) > 1e-2
    assert SentenceTransformer(str(export), device="cpu").max_seq_length == 22


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForMaskedLM])
def test_transformers_loads_the_weights(data, finished, kind):
    path, _ = checkpoint.find_latest(finished / "run" / "checkpoints")
    model, report = kind.from_pretrained(finished / "run" / "export", output_loading_info=True)
    # no masked language model has a pooler: AutoModel adds one for RoBERTa, which nothing here uses
    assert all(name.startswith("pooler.") for name in report["missing_keys"])
    assert not report["mismatched_keys"]
    loaded = {name: tensor for name, tensor in model.named_parameters() if not name.startswith("pooler.")}
    stored = load_file(path / "encoder.safetensors")
    prefix = "model.roberta." if kind is AutoModel else "model."
    assert loaded
    for name, tensor in loaded.items():
        assert torch.equal(tensor, stored[prefix + name]), name
    config = runs.train_config(data, "unused", **runs.FINISHED)
    fresh = dict(build_encoder(config, AutoTokenizer.from_pretrained(data / "tokenizer")).named_parameters())
    assert any(not torch.equal(fresh[name], tensor) for name, tensor in stored.items()), "these are not trained"


def test_the_folder_tells_where_it_comes_from(finished):
    card = (finished / "run" / "export" / "README.md").read_text()
    _, state = checkpoint.find_latest(finished / "run" / "checkpoints")
    for fact in (state.data_hash, state.config_hash, "library_name: sentence-transformers", "for 8 steps"):
        assert fact in card
    for name, value in state.scores.items():
        assert f"| {name} | {value:.4f} |" in card
    verdict = read_json(finished / "run" / "summary.json")["verdict"]
    says(card, verdict["sentence"])
    assert (verdict["score"], verdict["rows"]) == ("distant_recall_at_1", 20)
    assert verdict["exported"] == pytest.approx(state.scores["reported_distant_recall_at_1"])


def test_a_run_killed_before_its_export_exports_with_the_same_command(data, finished, copied):
    shutil.rmtree(copied / "export")
    half = copied / ".export.1.tmp"
    half.mkdir()
    summary = train(runs.train_config(data, copied, **runs.FINISHED))
    assert not ray.is_initialized(), "nothing is left to train"
    assert summary["steps"] == 8
    again, before = copied / "export" / "model.safetensors", finished / "run" / "export" / "model.safetensors"
    assert again.read_bytes() == before.read_bytes()


def test_no_whole_checkpoint_is_an_error_not_an_export(data, copied):
    from declutr.trainer.driver.export import export

    shutil.rmtree(copied / "export")
    for path in (copied / "checkpoints").glob("step-*"):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export(runs.resolved(runs.train_config(data, copied, **runs.FINISHED)))
    assert not (copied / "export").exists()


def exported(data, run, family, pooling):
    """Random weights, written as a checkpoint of a finished run: its encoder and the folder of its export."""
    from declutr.trainer.checkpoints.state import RunState
    from declutr.trainer.driver.export import export

    scratch = {**runs.FROM_CONFIG, "model_type": family}
    changes = {"encoder": {"from_config": scratch, "pooling": pooling, "projection": {"kind": "mlp"}}}
    config = runs.train_config(data, run, **changes)
    encoder = build_encoder(config, AutoTokenizer.from_pretrained(data / "tokenizer"))
    counts = {"step": 6, "documents": 48, "world_size": 1}
    state = RunState(**counts, config_hash="c", data_hash="d", scores={}, files={})
    contents = collect([tiny_train_step(encoder, loss=declutr(config.objective))])
    checkpoint.save(run / "checkpoints", state, contents)
    return encoder.eval(), export(runs.resolved(config))


@pytest.mark.parametrize("family", ["roberta", "bert", "modernbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_every_family_and_pooling_exports_what_was_trained_without_the_projection(data, tmp_path, family, pooling):
    encoder, folder = exported(data, tmp_path, family, pooling)
    assert not any("projection" in name for name in load_file(folder / "model.safetensors"))
    theirs = SentenceTransformer(str(folder), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    limit = 22 if family == "roberta" else 24
    assert theirs.max_seq_length == limit
    ours = embed(encoder, tokenizer, TEXTS[:3] + TEXTS[4:])
    np.testing.assert_allclose(theirs.encode(TEXTS[:3] + TEXTS[4:]), ours, atol=1e-5, rtol=0)
    assert theirs.encode(TEXTS).shape == (len(TEXTS), 32)


def test_the_mean_without_cls_is_read_by_us_alone(data, tmp_path):
    """sentence-transformers has no such pooling; the lines of the card are run in tests/evaluation/test_upload.py."""
    encoder, folder = exported(data, tmp_path, "bert", "mean_without_cls")
    texts = TEXTS[1:3] + TEXTS[5:]
    expected = embed(encoder, AutoTokenizer.from_pretrained(folder), texts)
    np.testing.assert_allclose(load_encoder(str(folder), device="cpu").encode(texts), expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="mean_without_cls"):
        SentenceTransformer(str(folder), device="cpu")


def test_inspect_explains_shards(data, capsys):
    assert main(["inspect", str(data), "--documents", "2"]) == 0
    shown = capsys.readouterr().out
    assert "320 documents read" in shown
    assert "checksums as in the manifest" in shown
    assert len(re.findall(r"^- row \d+ \([0-9a-f]{32}, corpus.jsonl\): \d+ tokens\n    \S", shown, re.MULTILINE)) == 2


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


def test_demo_shows_its_table_and_neighbours(data, finished):
    lines = list(table({name: dict.fromkeys(COLUMNS, 0.5) for name in ("untrained", "mlm_only", "declutr")}))
    assert lines[0].split()[2:6] == ["recall_at_1", "mrr", "distant_recall_at_1", "distant_mrr"]
    assert [line.split().count("0.500") for line in lines] == [0, 8, 8, 8]
    assert len({len(line) for line in lines}) == 1
    shown = list(neighbours(data, finished / "run" / "export"))
    assert sum(line.startswith("- ") for line in shown) == 4
    assert sum(line.startswith("    ") for line in shown) == 8
