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
from declutr.trainer.checkpoints.weights import collect, load
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.run import RunPlan

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 24
DROPOUT = {"encoder": {"dropout": 0.1}}
METRIC_LEARNING = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss", "loss_arguments": {"temperature": 0.05}}
METRIC_LEARNING |= {"miner": "MultiSimilarityMiner", "miner_arguments": {"epsilon": 0.1}}
VARIANTS = {
    "both": DROPOUT,
    "contrastive": DROPOUT | {"objective": {"terms": "contrastive"}},
    "mlm": {"encoder": {"dropout": 0.1, "projection": {"kind": "mlp"}}, "objective": {"terms": "mlm"}},
    "queue": DROPOUT | {"objective": {"queue_size": 40}},
    "metric learning": DROPOUT | {"objective": {"loss": METRIC_LEARNING}},
    "unmasked anchors": DROPOUT | {"objective": {"contrast_unmasked_anchors": True}},
    "projection": {"encoder": {"dropout": 0.1, "projection": {"kind": "mlp", "size": 8}}},
    "microbatches": DROPOUT | {"microbatch_tokens": 250},
    "bf16": DROPOUT | {"precision": "bf16"},
    "padded": {"encoder": {"dropout": 0.1, "layout": "padded"}},
    "bert": {"encoder": {"dropout": 0.1, "from_config": {**runs.FROM_CONFIG, "model_type": "bert"}}},
    "modernbert": {"encoder": {"dropout": 0.1, "from_config": {**runs.FROM_CONFIG, "model_type": "modernbert"}}},
    "uncorrected": DROPOUT | {"optim": {"bias_correction": False}},
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


@pytest.mark.parametrize("name", VARIANTS)
def test_objective_learns_and_resumes_to_the_bit(data, tmp_path, name):
    changes = VARIANTS[name]
    whole = Run(data, **changes)
    before = {name: p.detach().clone() for name, p in whole.train_step.encoder.named_parameters()}
    measured = whole.steps(1, STEPS)
    objective = whole.config.objective
    # what a queue holds is easy to tell from the batch while the encoder changes fast: its loss rises at first
    losses = [m.terms["mlm"] if objective.queue_size else m.loss for m in measured]
    assert np.mean(losses[-6:]) < np.mean(losses[:6]), losses
    assert all((m.terms["contrastive"] > 0) == objective.embeds for m in measured)
    assert all((m.terms["mlm"] > 0) == objective.mlm for m in measured)
    assert (max(m.padding_share for m in measured) > 0) == (whole.config.encoder.layout == "padded")
    if (untouched := {"contrastive": "lm_head", "mlm": "projection"}.get(name)) is not None:
        for parameter, value in whole.train_step.encoder.named_parameters():
            assert torch.equal(before[parameter], value) == (untouched in parameter), "a parameter without a loss stays"

    half = Run(data, **changes)
    half.steps(1, STEPS // 2)
    path = checkpoint.save(tmp_path, runs.state_of(STEPS // 2), collect([half.train_step]))
    resumed = Run(data, **changes)
    load(path, [resumed.train_step])
    for file in path.glob("*.safetensors"):  # else a deleted checkpoint keeps its room on the disk until the run ends
        num_bytes = file.stat().st_size
        with file.open("r+b") as stream:
            stream.write(bytes(num_bytes))
    assert resumed.steps(STEPS // 2 + 1, STEPS) == measured[STEPS // 2 :]
    for name, parameter in whole.train_step.encoder.named_parameters():
        assert torch.equal(parameter, dict(resumed.train_step.encoder.named_parameters())[name]), name


def test_a_checkpoint_of_another_encoder_is_refused(data, tmp_path):
    run = Run(data)
    path = checkpoint.save(tmp_path, runs.state_of(1), collect([run.train_step]))
    wider = Run(data, encoder={"from_config": {**runs.FROM_CONFIG, "hidden_size": 16}})
    with pytest.raises(CheckpointError, match=all_of("shape", ", 32]", ", 16]")):
        load(path, [wider.train_step])
    other = Run(data, encoder={"projection": {"kind": "linear"}})
    with pytest.raises(CheckpointError, match=all_of("parameters", "differ")):
        load(path, [other.train_step])
    parts = ("encoder", "objective", "optimizer")
    assert set(json.loads((path / "state.json").read_text())["files"]) == {f"{part}.safetensors" for part in parts}


UNEQUAL = [(40, 64), (40, 13), (2, 64)]
"""Documents and sizes of chunks: of 3 ranks 13, 13 and 14 documents in 1, 1 and 2 chunks; 2 documents in all."""


def held_out_embeddings(comm, data, run):
    """Embeddings of the held-out split by untrained weights."""
    embeddings = []
    for documents, chunk in UNEQUAL:
        changes = {"scaling": {"fsdp": True}, "validation": {"max_documents": documents, "every_steps": 1}}
        plan = RunPlan.of(runs.train_config(data, run, **changes))
        parts = build_parts(plan, comm, torch.float64)
        build_train_steps(plan, parts.tasks, 1)
        assert parts.encoder.sharded == (comm.size > 1)
        ((_, validator),) = build_validator(plan, parts, torch.device("cpu")).parts
        with patch("declutr.trainer.objectives.declutr.validator._CHUNK", chunk):
            embeddings.append(validator.embed(parts.encoder))
    return embeddings


@pytest.mark.dist
def test_held_out_scores_with_unequal_shares(data, tmp_path):
    expected = held_out_embeddings(Communicator(), data, tmp_path)
    assert [len(embeddings[0]) for embeddings in expected] == [documents for documents, _ in UNEQUAL]
    for rank in run_group(3, held_out_embeddings, data, tmp_path):
        assert all(deviation(actual, whole) < 1e-10 for actual, whole in zip(rank, expected, strict=True))


KEPT = {"drop": 64, "fewer_anchors": 32, "shrink_spans": 24}


def test_shorter_documents_are_kept_and_the_trainer_follows(tmp_path):
    """Spans that do not fit are refused, but only where they do not; every held-out document is scored."""
    rng, kept = random.Random(0), {}
    words = ["".join(rng.choices("abcdefgh", k=3)) for _ in range(100)]
    rows = [{"text": " ".join(rng.choices(words, k=rng.randint(8, 80)))} for _ in range(300)]  # 10 to 150 tokens
    for mode in KEPT:
        settings = {"geometry": {"num_anchors": 2, "max_tokens": 16, "min_tokens": 6}, "short_documents": mode}
        folder, _ = prepare_rows(tmp_path / mode, {"kind": "documents"}, rows, **settings)
        shards = ShardSet(folder, "train")
        table = shards.take(np.arange(shards.num_documents))
        lengths = table.column("num_tokens").to_numpy()
        kept[mode] = set(table.column("id").to_pylist())
        assert KEPT[mode] <= lengths.min() < KEPT[mode] + 8
        (room,) = [line for line in describe(folder, num_documents=2) if "16 tokens" in line]
        assert ("in short ones" in room) == (mode == "fewer_anchors")
        assert ("6 or more" in room) == (mode == "shrink_spans")
        for spans, fits, facts in (
            ({"num_anchors": 3}, mode == "fewer_anchors", ("spans.num_anchors = 3", "at most 2")),
            ({"min_tokens": 7}, mode != "shrink_spans", ("spans.min_tokens = 7", "short documents", "6 tokens")),
            ({}, True, ()),
        ):
            config = runs.train_config(folder, "unused", validation={"every_steps": 4}, spans=spans)
            lines = problems(config)
            assert len(lines) == (not fits), lines
            if lines:
                says(lines, facts)
        tokenizer, vocabulary = load_tokenizer(folder)
        encoder = build_encoder(config, tokenizer)
        objective = build_objective(config.main, encoder, shards.manifest.short_documents)
        collator = objective.collator(vocabulary, max_content(encoder, vocabulary))
        spans = collator.sample(table, np.zeros(len(table), np.int64))
        anchors = np.minimum(2, lengths // 32) if mode == "fewer_anchors" else np.full(len(table), 2)
        assert spans.present.sum(axis=1).tolist() == anchors.tolist()
        assert (anchors.min() == 1) == (mode == "fewer_anchors")
        validator = span_validator(config, encoder, vocabulary)
        held_out = validator.embed(encoder)
        assert {len(rows) for rows in held_out} == {len(validator.rows)}
        assert len(validator.rows) == 40 or mode == "drop"
        lengths = validator.held_out.shards.take(validator.rows).column("num_tokens").to_numpy()
        assert held_out[-1][torch.tensor(lengths >= 3 * 16)].all()
        assert (validator.scores(encoder)["distant_share"] < 1) == (mode == "fewer_anchors")
    assert kept["drop"] < kept["fewer_anchors"] < kept["shrink_spans"]
