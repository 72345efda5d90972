"""Every variant of objective and encoder learns on real shards and resumes to the bit; shards of short documents."""

import json
import random
from unittest.mock import patch

import numpy as np
import pytest
import tinyruns as runs
import torch
from groups import run_group
from measures import deviation
from messages import all_of, says
from preparing import prepare_rows
from tinyruns import problems, span_validator

from declutr.common.errors import CheckpointError
from declutr.inspection.describe import describe
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import (
    build_encoder,
    build_objective,
    build_parts,
    build_train_steps,
    build_validator,
    load_tokenizer,
    max_content,
)
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.config import TrainConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 24
DROPOUT = {"encoder": {"dropout": 0.1}}
METRIC_LEARNING = {
    "kind": "pytorch_metric_learning",
    "loss": "NTXentLoss",
    "loss_arguments": {"temperature": 0.05},
    "miner": "MultiSimilarityMiner",
    "miner_arguments": {"epsilon": 0.1},
}
VARIANTS = {
    "both": DROPOUT,
    "contrastive": DROPOUT | {"objective": {"terms": "contrastive"}},
    "mlm": DROPOUT | {"objective": {"terms": "mlm"}},
    "queue": DROPOUT | {"objective": {"queue_size": 40}},
    "metric learning": DROPOUT | {"objective": {"loss": METRIC_LEARNING}},
    "unmasked anchors": DROPOUT | {"objective": {"contrast_unmasked_anchors": True}},
    "projection": {"encoder": {"dropout": 0.1, "projection": {"kind": "mlp", "size": 8}}},
    "cls": {"encoder": {"dropout": 0.1, "pooling": "cls"}},
    "max": {"encoder": {"dropout": 0.1, "pooling": "max"}},
    "microbatches": DROPOUT | {"microbatch_tokens": 100},
    "bf16": DROPOUT | {"precision": "bf16"},
    "padded": {"encoder": {"dropout": 0.1, "layout": "padded"}},
    "bert": {"encoder": {"dropout": 0.1, "from_config": {**runs.FROM_CONFIG, "model_type": "bert"}}},
    "modernbert": {"encoder": {"dropout": 0.1, "from_config": {**runs.FROM_CONFIG, "model_type": "modernbert"}}},
    "uncorrected": DROPOUT | {"optim": {"bias_correction": False}},
    "adjacent": DROPOUT | {"spans": {"strategy": "adjacent"}},
    "subsuming": DROPOUT | {"spans": {"strategy": "subsuming"}},
    "four anchors of one document": DROPOUT | {"spans": {"num_anchors": 1, "num_positives": 4}},
}


class Run:
    """A run without Ray: the parts the loop puts together, on shards made by the pipeline."""

    def __init__(self, data, **changes):
        self.config = config = runs.train_config(data, "unused", **{"optim": {"lr": 3e-3}, **changes})
        plan = RunPlan.of(config)
        parts = build_parts(plan, Communicator(), torch.device("cpu"))
        self.shards, self.plan, self.collator = plan.training_shards[""], plan.orders[""], parts.collators[""]
        [self.train_step] = build_train_steps(plan, parts.tasks, STEPS)

    def steps(self, first, last):
        measured = []
        for step in range(first, last + 1):
            epochs, rows = self.plan.documents(step - 1, step)
            measured.append(self.train_step.step({"": self.collator.collate(self.shards.take(rows), epochs)}, step))
        return measured

    def state(self, step):
        numbers = {"step": step, "documents": step * self.config.batch_documents, "world_size": 1}
        return RunState(**numbers, config_hash="", data_hash="", scores={}, files={})


@pytest.mark.parametrize("name", VARIANTS)
def test_objective_learns_and_resumes_to_the_bit(data, tmp_path, name):
    changes = VARIANTS[name]
    whole = Run(data, **changes)
    measured = whole.steps(1, STEPS)
    objective = whole.config.objective
    # what a queue holds is easy to tell from the batch while the encoder changes fast: its loss rises at first
    losses = [m.terms["mlm"] if objective.queue_size else m.loss for m in measured]
    assert np.mean(losses[-6:]) < np.mean(losses[:6]), losses
    assert all((m.terms["contrastive"] > 0) == objective.embeds for m in measured)
    assert all((m.terms["mlm"] > 0) == objective.mlm for m in measured)
    assert (max(m.padding_share for m in measured) > 0) == (whole.config.encoder.layout == "padded")

    half = Run(data, **changes)
    half.steps(1, STEPS // 2)
    path = checkpoint.save(tmp_path, half.state(STEPS // 2), collect([half.train_step]))
    resumed = Run(data, **changes)
    load(path, [resumed.train_step])
    assert resumed.steps(STEPS // 2 + 1, STEPS) == measured[STEPS // 2 :]
    for name, parameter in whole.train_step.encoder.named_parameters():
        assert torch.equal(parameter, dict(resumed.train_step.encoder.named_parameters())[name]), name


def test_loaded_tensors_outlive_their_file(data, tmp_path):
    """Else a deleted checkpoint keeps its room on the disk until the run ends."""
    run = Run(data, objective={"queue_size": 40})
    run.steps(1, 2)
    path = checkpoint.save(tmp_path, run.state(2), collect([run.train_step]))
    resumed = Run(data, objective={"queue_size": 40})
    load(path, [resumed.train_step])
    for file in path.glob("*.safetensors"):
        num_bytes = file.stat().st_size
        with file.open("r+b") as stream:
            stream.write(bytes(num_bytes))
    assert resumed.steps(3, 4) == run.steps(3, 4)


def test_parameters_without_a_loss_stay_as_they_were(data):
    for terms, untouched in (("contrastive", "lm_head"), ("mlm", "projection")):
        run = Run(data, objective={"terms": terms}, encoder={"projection": {"kind": "mlp"}})
        before = {name: p.detach().clone() for name, p in run.train_step.encoder.named_parameters()}
        run.steps(1, 3)
        for name, parameter in run.train_step.encoder.named_parameters():
            still = torch.equal(before[name], parameter)
            assert still == (untouched in name), name


def test_a_checkpoint_of_another_encoder_is_refused(data, tmp_path):
    run = Run(data)
    path = checkpoint.save(tmp_path, run.state(1), collect([run.train_step]))
    wider = Run(data, encoder={"from_config": {**runs.FROM_CONFIG, "hidden_size": 16}})
    with pytest.raises(CheckpointError, match=all_of("shape", ", 32]", ", 16]")):
        load(path, [wider.train_step])
    other = Run(data, encoder={"projection": {"kind": "linear"}})
    with pytest.raises(CheckpointError, match=all_of("parameters", "differ")):
        load(path, [other.train_step])
    parts = ("encoder", "objective", "optimizer")
    assert set(json.loads((path / "state.json").read_text())["files"]) == {f"{part}.safetensors" for part in parts}


def held_out_embeddings(comm, values, chunk):
    """Embeddings of the held-out split by untrained weights."""
    plan = RunPlan.of(TrainConfig.model_validate(values))
    parts = build_parts(plan, comm, torch.float64)
    build_train_steps(plan, parts.tasks, 1)
    assert parts.encoder.sharded == (comm.size > 1)
    ((_, validator),) = build_validator(plan, parts, torch.device("cpu")).parts
    with patch("declutr.trainer.objectives.declutr.validator._CHUNK", chunk):
        return validator.embed(parts.encoder)


@pytest.mark.dist
@pytest.mark.parametrize(("documents", "chunk"), [(40, 64), (40, 13), (2, 64)])
def test_held_out_scores_with_unequal_shares(data, tmp_path, documents, chunk):
    """13, 13 and 14 documents in chunks of 64 and 13 (1, 1 and 2 chunks), and 2 documents for 3 ranks."""
    changes = {"scaling": {"fsdp": True}, "validation": {"max_documents": documents, "every_steps": 1}}
    values = runs.train_values(data, tmp_path, **changes)
    expected = held_out_embeddings(Communicator(), values, chunk)
    assert len(expected[0]) == documents
    for found in run_group(3, held_out_embeddings, values, chunk):
        assert deviation(found, expected) < 1e-10


GEOMETRY = {"num_anchors": 2, "max_tokens": 16, "min_tokens": 6}
KEPT = {"drop": 64, "fewer_anchors": 32, "shrink_spans": 24}
MODES = ("fewer_anchors", "shrink_spans")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folders of shards by mode, from one corpus of documents of some 10 to 150 tokens."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(100)]
    texts = [" ".join(rng.choices(words, k=rng.randint(8, 80))) for _ in range(300)]
    rows = [{"text": text} for text in texts]
    return {
        mode: prepare_rows(folder / mode, {"kind": "documents"}, rows, geometry=GEOMETRY, short_documents=mode)[0]
        for mode in KEPT
    }


def config_of(folder, run="unused", **changes):
    return runs.train_config(folder, run, **{"validation": {"every_steps": 4}, **changes})


def test_shorter_documents_are_kept_and_the_trainer_follows(prepared):
    kept = {}
    for mode, folder in prepared.items():
        shards = ShardSet(folder, "train")
        table = shards.take(np.arange(shards.num_documents))
        lengths = table.column("num_tokens").to_numpy()
        kept[mode] = set(table.column("id").to_pylist())
        assert KEPT[mode] <= lengths.min() < KEPT[mode] + 8
        config = config_of(folder)
        assert problems(config) == []
        tokenizer, vocabulary = load_tokenizer(folder)
        encoder = build_encoder(config, tokenizer)
        objective = build_objective(config.main, encoder, shards.manifest.short_documents)
        collator = objective.collator(vocabulary, max_content(encoder, vocabulary))
        spans = collator.sample(table, np.zeros(len(table), np.int64))
        anchors = np.minimum(2, lengths // 32) if mode == "fewer_anchors" else np.full(len(table), 2)
        assert spans.present.sum(axis=1).tolist() == anchors.tolist()
        assert (anchors.min() == 1) == (mode == "fewer_anchors")
    assert kept["drop"] < kept["fewer_anchors"] < kept["shrink_spans"]


def test_inspect_shows_the_room_of_the_windows(prepared):
    for mode, folder in prepared.items():
        lines = list(describe(folder, num_documents=2))
        (said,) = [line for line in lines if "16 tokens" in line]
        assert ("in short ones" in said) == (mode == "fewer_anchors")
        assert ("6 or more" in said) == (mode == "shrink_spans")


def test_spans_that_do_not_fit_the_shards_are_refused_where_they_do_not(prepared):
    more = {"spans": {"num_anchors": 3}}
    assert problems(config_of(prepared["fewer_anchors"], **more)) == []
    for mode in ("drop", "shrink_spans"):
        (line,) = problems(config_of(prepared[mode], **more))
        says(line, "spans.num_anchors = 3", "at most 2")
    longer = {"spans": {"min_tokens": 7}}
    for mode in ("drop", "fewer_anchors"):
        assert problems(config_of(prepared[mode], **longer)) == []
    (line,) = problems(config_of(prepared["shrink_spans"], **longer))
    says(line, "spans.min_tokens = 7", "short documents", "6 tokens")


@pytest.mark.parametrize("mode", MODES)
def test_every_held_out_document_is_scored(prepared, mode):
    config = config_of(prepared[mode])
    tokenizer, vocabulary = load_tokenizer(prepared[mode])
    encoder = build_encoder(config, tokenizer)
    validator = span_validator(config, encoder, vocabulary)
    held_out = validator.embed(encoder)
    assert {len(rows) for rows in held_out} == {len(validator.rows)} == {40}
    lengths = validator.held_out.shards.take(validator.rows).column("num_tokens").to_numpy()
    assert held_out[-1][torch.tensor(lengths >= 3 * 16)].all()
    assert (validator.scores(encoder)["distant_share"] < 1) == (mode == "fewer_anchors")
