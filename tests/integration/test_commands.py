"""Commands around a training that need no Ray: refusals with nothing half-written, the export as others load it."""

import os
import re
import shutil

import numpy as np
import pytest
import ray
import tinyruns as runs
import torch
from broken import flip_a_bit, truncate
from madeup import save
from messages import says
from preparing import checksums
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM, AutoTokenizer, RobertaConfig

from declutr.cli.main import main
from declutr.common.config import load_config
from declutr.common.errors import CheckpointError, ConfigError, RunLockedError, ShardError
from declutr.common.lock import RunLock
from declutr.common.storage import read_json
from declutr.encoders.loading import load_encoder
from declutr.inspection.describe import decoder
from declutr.pipeline.tokenizer.tokenization import train_tokenizer
from declutr.trainer.build import build_encoder, load_tokenizer
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.weights import load_parameters
from declutr.trainer.config import TrainConfig
from declutr.trainer.data.batches import SpanBatch
from declutr.trainer.driver.export import export
from declutr.trainer.train import run_training, train


@pytest.fixture
def run_bad(data, tmp_path, capsys):
    """Trains with changed settings; returns the lines of the refusal, which the command says too (the last test)."""

    def go(*overrides, folder=data, **changes):
        values = runs.train_values(folder, tmp_path / "run", **changes)
        config = runs.write_config(tmp_path / "train.yaml", train=values)
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        with pytest.raises(ConfigError) as refused:
            run_training(load_config(str(config), "train", TrainConfig, overrides))
        assert capsys.readouterr().out == ""
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        assert not ray.is_initialized()
        lines = str(refused.value).splitlines()
        assert lines[0].endswith(f"{len(lines) - 1} problem(s)"), lines
        return lines[1:]

    return go


@pytest.fixture
def broken(data, tmp_path):
    return shutil.copytree(data, tmp_path / "shards")


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        ("checkpoint.every_steps=0", [("checkpoint.every_steps = 0", "above 0", "null")]),
        ("export=best", [("export = best", "validation.every_steps", "above 0")]),
        ("export=best validation.patience=2", [("validation.every_steps", "above 0")]),
        (
            "validation.patience=2",
            [("validation.patience = 2", part) for part in ("export = best", "validation.every_steps above 0")],
        ),
        ("validation.patience=0", [("validation.patience = 0", "greater than 0")]),
        ("scaling.fsdp=true microbatch_tokens=auto", [("scaling.fsdp = True", "microbatch_tokens", "auto")]),
        ("encoder.from_config.max_position_embeddings=16", [("spans.max_tokens = 16", "14")]),
        ("encoder.from_config.num_attention_heads=3", ["3"]),
        ("encoder.from_config.vocab_size=299", [("299", "400")]),
    ],
)
def test_settings_and_encoders_that_cannot_work_are_refused(run_bad, overrides, messages):
    for line, message in zip(run_bad(*overrides.split()), messages, strict=True):
        says(line, message)


def test_shards_of_another_tokenizer_are_refused_also_if_it_is_in_the_place_of_their_own(
    run_bad, broken, tmp_path, capsys
):
    model = tmp_path / "model"
    train_tokenizer(["other words altogether, again and again"] * 20, 300).save_pretrained(model)
    shape = {key: value for key, value in runs.FROM_CONFIG.items() if key != "model_type"}
    AutoModelForMaskedLM.from_config(RobertaConfig(vocab_size=400, **shape)).save_pretrained(model)
    (line,) = run_bad(encoder={"from_config": None, "pretrained": str(model)})
    says(line, f"encoder.pretrained = {model}", "tokenizer", "made the shards")
    shutil.copy(model / "tokenizer.json", broken / "tokenizer" / "tokenizer.json")
    line, _ = run_bad(folder=broken)
    problem = f"the tokenizer in {broken / 'tokenizer'} is not the one that made the shards"
    assert problem in line
    with pytest.raises(ShardError, match=re.escape(problem)):  # where a run goes on, each worker looks for itself
        load_tokenizer(broken)
    for command in ("inspect", "report"):
        assert main([command, str(broken)]) == 1
        says("".join(capsys.readouterr()), problem)


@pytest.mark.parametrize(
    ("name", "damage", "facts"),
    [
        ("train-00000.arrow", lambda path: path.write_bytes(path.read_bytes()[:-60] + bytes(60)), ("not an Arrow",)),
        ("train-00000.arrow", flip_a_bit, ("damaged", "SHA-256")),
        ("tokenizer", shutil.rmtree, ("is missing; run `prepare` with the same settings again",)),
        ("tokenizer/tokenizer.json", lambda path: path.write_text("{"), ("is damaged", "delete")),
    ],
)
def test_a_shard_that_was_changed_in_place_or_a_lost_tokenizer_is_named(run_bad, broken, name, damage, facts):
    damage(broken / name)
    (line,) = run_bad(folder=broken)
    says(line, broken / name, *facts)
    if name.startswith("tokenizer"):
        with pytest.raises(ShardError, match=re.escape(str(broken / name))):  # and not the hub's answer
            decoder(broken)


def test_problems_are_said_although_ray_has_begun_to_start(data, tmp_path, capsys):
    values = runs.train_values(data, tmp_path / "run", batch_documents=10**6, spans={"max_tokens": 17})
    assert main(["train", str(runs.write_config(tmp_path / "train.yaml", train=values))]) == 1
    out, errors = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in errors
    for setting in ("batch_documents = 1000000", "spans.max_tokens = 17"):
        says(errors, setting)
    assert not ray.is_initialized()


TEXTS = ["", "a", "ab cd ef.", "one two three four " * 50, "\n\t ", "naïve façade ✓", "<mask> </s> in a text"]


def expected_of(config, run, texts=TEXTS):
    """Embeddings of our own encoder with the weights of the run's last checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(f"{config.data}/tokenizer")
    encoder = build_encoder(config, tokenizer).eval()
    load_parameters(checkpoint.find_latest(run / "checkpoints")[0], encoder)
    ids = tokenizer(texts, truncation=True, max_length=22)["input_ids"]  # 24 positions, RoBERTa's begin at 2
    lengths = torch.tensor([len(row) for row in ids])
    nothing = torch.empty(0, dtype=torch.int64)
    batch = SpanBatch(torch.tensor([token for row in ids for token in row]), lengths, nothing, nothing)
    with torch.no_grad():
        return encoder.embed(batch).numpy()


def test_three_libraries_give_the_same_vectors_and_the_folder_tells_where_they_come_from(data, finished):
    run = finished / "run"
    expected = expected_of(runs.finished_config(data, run), run)
    assert expected.shape == (len(TEXTS), 32)
    assert np.linalg.norm(expected[1] - expected[3]) > 1e-2
    other = SentenceTransformer(str(run / "export"), device="cpu")
    assert other.max_seq_length == 22
    path, state = checkpoint.find_latest(run / "checkpoints")
    for encoder in (other, *(load_encoder(str(folder), device="cpu") for folder in (run / "export", run, path))):
        np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5, rtol=0)
    card, measured = (run / "export" / "README.md").read_text(), runs.steps_of(run, "validation")
    scores = {step: line["distant_recall_at_1"] for step, line in measured.items() if step}  # no checkpoint of step 0
    best = max(scores, key=lambda step: (scores[step], -step))
    assert checkpoint.steps_in(run / "checkpoints") == sorted({6, 8, best}), "the last two, and the best"
    for fact in (state.data_hash, state.config_hash, "library_name: sentence-transformers", "for 8 steps"):
        assert fact in card
    for name, value in state.scores.items():
        assert f"| {name} | {value:.4f} |" in card
    verdict = read_json(run / "summary.json")["verdict"]
    says(card, verdict["sentence"])
    assert (verdict["score"], verdict["rows"]) == ("distant_recall_at_1", 20)
    assert verdict["exported"] == pytest.approx(state.scores["reported_distant_recall_at_1"])


def test_a_finished_run_is_left_as_it_is_and_without_its_export_exports_with_the_same_command(
    data, finished, copied, capsys
):
    before = checksums(copied)
    with RunLock(copied, lambda: None), pytest.raises(RunLockedError, match=f"pid {os.getpid()}"):
        run_training(runs.finished_config(data, copied))
    assert checksums(copied) == before, "another command works there"
    config = runs.write_config(copied.parent / "train.yaml", train=runs.train_values(data, copied, **runs.FINISHED))
    assert main(["train", str(config)]) == 0
    assert "finished already" in capsys.readouterr().err
    after = checksums(copied)
    assert {name for name in after if after[name] != before.get(name)} <= {"config.yaml", "summary.json"}
    assert set(after) == set(before)
    shutil.rmtree(copied / "export")  # as by a kill
    (copied / ".export.1.tmp").mkdir()
    assert train(runs.finished_config(data, copied))["steps"] == 8
    assert not ray.is_initialized(), "nothing is left to train"
    again, whole = ((run / "export" / "model.safetensors").read_bytes() for run in (copied, finished / "run"))
    assert again == whole
    shutil.rmtree(copied / "export")
    for path in (copied / "checkpoints").glob("step-*"):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export(runs.resolved(runs.finished_config(data, copied)), 8)
    assert not (copied / "export").exists(), "that would be no export"


@pytest.mark.parametrize(
    ("family", "pooling"), [("roberta", "cls"), ("bert", "max"), ("modernbert", "mean"), ("bert", "mean_without_cls")]
)
def test_every_family_and_pooling_exports_what_was_trained_without_the_projection(data, tmp_path, family, pooling):
    """sentence-transformers has no mean without cls; tests/evaluation/test_upload.py runs the lines of its card."""
    encoder = {"from_config": {**runs.FROM_CONFIG, "model_type": family}, "pooling": pooling}
    config = runs.train_config(data, tmp_path, encoder=encoder | {"projection": {"kind": "mlp"}})
    save(config, tmp_path)  # random weights, as a checkpoint of a finished run
    folder = export(runs.resolved(config), 8)
    assert not any("projection" in name for name in load_file(folder / "model.safetensors"))
    if pooling == "mean_without_cls":
        other, texts = load_encoder(str(folder), device="cpu"), TEXTS[1:3] + TEXTS[5:]
        with pytest.raises(ValueError, match="mean_without_cls"):
            SentenceTransformer(str(folder), device="cpu")
    else:
        other, texts = SentenceTransformer(str(folder), device="cpu"), TEXTS[:3] + TEXTS[4:]
        assert other.max_seq_length == (22 if family == "roberta" else 24)
        assert other.encode(TEXTS).shape == (len(TEXTS), 32)
    np.testing.assert_allclose(other.encode(texts), expected_of(config, tmp_path, texts), atol=1e-5, rtol=0)


def test_inspect_explains_shards_a_run_a_checkpoint_and_an_export(data, copied, capsys):
    assert main(["inspect", str(data), "--documents", "2"]) == 0
    output = capsys.readouterr().out
    assert "320 documents read" in output
    assert "checksums as in the manifest" in output
    assert len(re.findall(r"^- row \d+ \([0-9a-f]{32}, corpus.jsonl\): \d+ tokens\n    \S", output, re.MULTILINE)) == 2
    last = sorted((copied / "checkpoints").glob("step-*"))[-1]
    for path, words in ((copied, "8 steps logged"), (last, "after step 8"), (copied / "export", "after 8 steps")):
        assert main(["inspect", str(path)]) == 0
        assert words in capsys.readouterr().out
    truncate(last / "encoder.safetensors")
    for path, facts in ((last, ("encoder.safetensors", "truncated", "altered")), (copied.parent, "no manifest")):
        assert main(["inspect", str(path)]) == 1
        says(capsys.readouterr().err, facts)


@pytest.mark.dist
def test_verify_gradients_of_a_users_configuration_passes(data, tmp_path, capsys):
    """Dropout and attention dropout on, a queue; of three processes with shards of the parameters one has no document.

    tests/integration/test_task_runs.py has two processes with whole parameters.
    """
    values = runs.train_values(data, tmp_path / "run", encoder={"dropout": 0.1}, objective={"queue_size": 16})
    config = runs.write_config(tmp_path / "train.yaml", train=values)
    assert main(["verify-gradients", str(config), "scaling.fsdp=true", "--documents", "2", "--processes", "3"]) == 0
    output = capsys.readouterr().out
    counts = {word: output.count(word) for word in ("        3 ", "float64", "float32", "APART")}
    assert counts == {"        3 ": 6, "float64": 5, "float32": 5, "APART": 0}
    assert main(["verify-gradients", str(config), "data=nowhere", "batch_documents=0"]) == 1
