"""The exported folder as other libraries load it, and the commands around training on what the real ones made."""

import re
import shutil

import numpy as np
import pytest
import ray
import tinyruns as runs
import torch
from broken import truncate
from madeup import save
from messages import says
from preparing import checksums
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from declutr.cli.main import main
from declutr.cli.runs import COLUMNS, table
from declutr.common.errors import CheckpointError
from declutr.common.storage import read_json
from declutr.encoders.loading import load_encoder
from declutr.trainer.build import build_encoder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import load_parameters
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.driver.export import export
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
    run = finished / "run"
    encoder, tokenizer, path = encoder_of(data, run, **runs.FINISHED)
    expected = embed(encoder, tokenizer, TEXTS)
    assert expected.shape == (len(TEXTS), 32)
    assert np.linalg.norm(expected[1] - expected[3]) > 1e-2
    theirs = SentenceTransformer(str(run / "export"), device="cpu")
    assert theirs.max_seq_length == 22
    for encoder in (theirs, *(load_encoder(str(folder), device="cpu") for folder in (run / "export", run, path))):
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5, rtol=0)


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
    checkpoints, measured = finished / "run" / "checkpoints", runs.steps_of(finished / "run", "validation")
    _, state = checkpoint.find_latest(checkpoints)
    scores = {step: line["distant_recall_at_1"] for step, line in measured.items() if step}  # no checkpoint of step 0
    best = max(scores, key=lambda step: (scores[step], -step))
    assert checkpoint.steps_in(checkpoints) == sorted({6, 8, best}), "the last two, and the best"
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


def test_a_finished_run_is_left_as_it_is(data, copied, capsys):
    before = checksums(copied)
    config = runs.write_config(copied.parent / "train.yaml", train=runs.train_values(data, copied, **runs.FINISHED))
    assert main(["train", str(config)]) == 0
    assert not ray.is_initialized()
    assert "finished already" in capsys.readouterr().err
    after = checksums(copied)
    assert {name for name in after if after[name] != before.get(name)} <= {"config.yaml", "summary.json"}
    assert set(after) == set(before)


def test_no_whole_checkpoint_is_an_error_not_an_export(data, copied):
    shutil.rmtree(copied / "export")
    for path in (copied / "checkpoints").glob("step-*"):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export(runs.resolved(runs.train_config(data, copied, **runs.FINISHED)), 8)
    assert not (copied / "export").exists()


def exported(data, run, family, pooling):
    """Random weights, written as a checkpoint of a finished run: its encoder and the folder of its export."""
    scratch = {**runs.FROM_CONFIG, "model_type": family}
    changes = {"encoder": {"from_config": scratch, "pooling": pooling, "projection": {"kind": "mlp"}}}
    config = runs.train_config(data, run, **changes)
    save(config, run)
    return encoder_of(data, run, **changes)[0], export(runs.resolved(config), 8)


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("roberta", "mean"), ("roberta", "cls"), ("roberta", "max"), ("bert", "mean"), ("modernbert", "mean")],
)
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


def test_inspect_explains_a_run_a_checkpoint_and_an_export(copied, capsys):
    last = sorted((copied / "checkpoints").glob("step-*"))[-1]
    for path, words in ((copied, "8 steps logged"), (last, "after step 8"), (copied / "export", "after 8 steps")):
        assert main(["inspect", str(path)]) == 0
        assert words in capsys.readouterr().out
    truncate(last / "encoder.safetensors")
    for path, facts in ((last, ("encoder.safetensors", "truncated", "altered")), (copied.parent, ("no manifest",))):
        assert main(["inspect", str(path)]) == 1
        says(capsys.readouterr().err, *facts)


@pytest.mark.dist
def test_verify_gradients_of_a_users_configuration_passes(data, tmp_path, capsys):
    """Dropout and attention dropout on, a queue; of three processes with shards of the parameters one has no document.

    tests/integration/test_task_runs.py has two processes with whole parameters.
    """
    values = runs.train_values(data, tmp_path / "run", encoder={"dropout": 0.1}, objective={"queue_size": 16})
    config = runs.write_config(tmp_path / "train.yaml", train=values)
    sharded = ["scaling.fsdp=true", "--documents", "2", "--processes", "3"]
    assert main(["verify-gradients", str(config), *sharded]) == 0
    shown = capsys.readouterr().out
    assert shown.count("        3 ") == 6
    assert shown.count("float64") == shown.count("float32") == 5
    assert "APART" not in shown
    assert main(["verify-gradients", str(config), "data=nowhere", "batch_documents=0"]) == 1


def test_demo_shows_its_table():
    lines = list(table({name: dict.fromkeys(COLUMNS, 0.5) for name in ("untrained", "mlm_only", "declutr")}))
    assert lines[0].split()[2:6] == ["recall_at_1", "mrr", "distant_recall_at_1", "distant_mrr"]
    assert [line.split().count("0.500") for line in lines] == [0, 8, 8, 8]
    assert len({len(line) for line in lines}) == 1
