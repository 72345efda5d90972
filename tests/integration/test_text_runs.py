"""SimCSE, SCD and SCL as ordinary runs: prepare, train, export, checks; test_task_runs.py kills and resizes them."""

import json
import re

import pytest
import tinyruns as runs
import torch
from messages import all_of
from sentence_transformers import SentenceTransformer
from textruns import SCD, SCL, SIMCSE, write_texts

from declutr.common.errors import ConfigError
from declutr.encoders.loading import load_encoder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare
from declutr.trainer.driver.checks import problems
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import train

pytestmark = [pytest.mark.ray]

WITH_MLM = SIMCSE | {"mlm_loss_weight": 0.1}
LONGFORMER = runs.FROM_CONFIG | {"model_type": "longformer", "attention_window": [8, 8]}
SUPERVISED = {"kind": "simcse", "supervised": True, "max_tokens": 16}


@pytest.fixture(scope="module")
def texts(session, tmp_path_factory):  # noqa: ARG001 - Ray for preparation
    """Folder with the shards `sentences` and `pairs`, made with one tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    write_texts(folder)
    for name, file, content in (
        ("sentences", "sentences.txt", "sentences"),
        ("pairs", "pairs.jsonl", {"kind": "pairs", "required_labels": ["entailment", "contradiction"]}),
    ):
        values = runs.prepare_values(folder / file, folder / name) | {"content": content, "unit_mib": 32}
        del values["geometry"]
        if name == "pairs":
            values["tokenizer"] = {"kind": "pretrained", "name": str(folder / "sentences" / "tokenizer")}
        prepare(PipelineConfig.model_validate(values))
    return folder


def values_of(texts, run, objective, **changes):
    data = texts / ("pairs" if objective["kind"] == "scl" or objective.get("supervised") else "sentences")
    changes = {"encoder": {"dropout": 0.1}, "steps": 6, "objective": objective, **changes}
    values = runs.train_values(data, run, **changes)
    del values["spans"]
    return values


def config_of(*arguments, **changes):
    return TrainConfig.model_validate(values_of(*arguments, **changes))


@pytest.mark.parametrize(
    ("objective", "pooling", "layers"),
    [
        (SIMCSE, "cls", 0),
        (SUPERVISED, "cls", 1),
        (SCD, "cls", 0),
        (SCL, "mean", 0),
    ],
    ids=["simcse", "simcse supervised", "scd", "scl"],
)
def test_exports_load_elsewhere_with_equal_embeddings(texts, tmp_path, objective, pooling, layers):
    """In sentence-transformers, as the export and as the checkpoint; STS-B chooses the best checkpoint."""
    config = config_of(
        texts,
        tmp_path / "run",
        objective,
        encoder={"dropout": 0.1, "pooling": pooling},
        validation={"every_steps": 2, "stsb": str(texts)},
        checkpoint={"every_steps": 2, "keep_last": 5},
        scaling={"num_workers": 0},
        export="best",
    )
    assert config.validation.score == "stsb_spearman"
    train(config)
    scores = runs.steps_of(tmp_path / "run", "validation")
    assert all("stsb_spearman" in line and "uniformity" in line for line in scores.values())
    assert all(("recall_at_1" in line) == (config.data.endswith("pairs")) for line in scores.values())
    sentences = ["aba bab", "a longer text of more words than the others", "x"]
    export = tmp_path / "run" / "export"
    there = SentenceTransformer(str(export), device="cpu")
    expected = torch.from_numpy(there.encode(sentences))
    found = torch.from_numpy(load_encoder(str(export)).encode(sentences))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert len(list(export.glob("*_Dense"))) == layers
    settings = json.loads((export / "declutr.json").read_text())
    path = tmp_path / "run" / "checkpoints" / f"step-{settings['step']:08}"
    from_checkpoint = torch.from_numpy(load_encoder(str(path)).encode(sentences))
    torch.testing.assert_close(from_checkpoint, expected, atol=1e-6, rtol=1e-6)
    best = max((line["stsb_spearman"], -step) for step, line in scores.items() if step)
    assert settings["step"] == -best[1]
    card = (export / "README.md").read_text()
    assert config.objective.method in card
    assert all(part in card for part in config.objective.dropped)


WRONG = [
    ("sentences", {"objective": SCL}, "scl reads pairs; data = .* holds sentences: prepare it with content.kind=pairs"),
    ("pairs", {"objective": SCD}, "scd reads sentences; data = .* holds pairs"),
    ("sentences", {"objective": SUPERVISED}, "objective.supervised = true: the shards hold sentences"),
    ("pairs", {"objective": SIMCSE}, "objective.supervised = false: the shards hold pairs"),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"dropout": 0.0}},
        "the two views of objective simcse would be equal",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"dropout": 1e-12}},  # below 2^-32 nothing is dropped
        "the two views of objective simcse would be equal",
    ),
    ("sentences", {"objective": SCD, "batch_documents": 1}, "need at least 2 sentences"),
    (
        "sentences",
        {"objective": SCD, "batch_documents": 1000},
        "a batch must not contrast one of them with itself",
    ),
    (
        "pairs",
        {"objective": SUPERVISED, "encoder": {"dropout": 0.1, "projection": {"kind": "mlp", "size": 16}}},
        "encoder.projection.kind = mlp: the layers that objective simcse exports would follow a projection",
    ),
    (
        "sentences",
        {
            "objective": SCD,
            "encoder": {"from_config": LONGFORMER},
        },
        "model type longformer drops some values at a rate of the whole model",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "encoder": {"from_config": LONGFORMER, "dropout": 0.1}},
        "model type longformer drops some values by torch's generator.*set encoder.attention_dropout=0",
    ),
    (
        "sentences",
        {"objective": SCD | {"repulsion_weight": 0, "decorrelation_weight": 0}},
        "repulsion_weight and decorrelation_weight are 0",
    ),
    (
        "sentences",
        {"objective": SIMCSE | {"max_tokens": 400}},
        "objective.max_tokens = 400: the encoder has positions for",
    ),
    (
        "sentences",
        {"objective": SIMCSE, "validation": {"every_steps": 2}, "checkpoint": {"every_steps": 2}, "export": "best"},
        "validation.score = recall_at_1: sentences do not have this score; set validation.stsb",
    ),
    ("sentences", {"objective": {"kind": "declutr"}}, "declutr reads documents; data = .* holds sentences"),
    ("sentences", {"objective": SIMCSE, "validation": {"every_steps": 2, "stsb": "nowhere"}}, "sts-dev.csv"),
]


@pytest.mark.parametrize(("data", "changes", "message"), WRONG)
def test_problems_are_found_before_ray_starts(texts, tmp_path, data, changes, message):
    objective = changes.pop("objective")
    changes = {"encoder": {"dropout": 0.1}} | changes
    config = config_of(texts, tmp_path / "run", objective, **changes).model_copy(update={"data": str(texts / data)})
    found = problems(config)
    assert any(re.search(message, line) for line in found), found
    changes["objective"] = objective


def test_rows_that_the_run_trains_on_are_no_validation_data(texts, tmp_path):
    validation = {"every_steps": 2, "data": str(texts / "sentences")}
    config = config_of(texts, tmp_path / "run", SIMCSE, validation=validation)
    assert any("these are the rows" in line for line in problems(config))


def test_rows_of_another_schema_are_no_validation_data(texts, tmp_path, data):
    """Documents for an objective over texts, which had failed in the first validation; sentences for pairs are fine."""
    for objective, scored, problem in (
        (SIMCSE, data, "which objective simcse"),
        (SCL, texts / "sentences", None),
    ):
        config = config_of(texts, tmp_path / "run", objective, validation={"every_steps": 2, "data": str(scored)})
        found = [line for line in problems(config) if "cannot score" in line]
        assert bool(found) == bool(problem), found
        assert problem is None or problem in found[0]


def test_unknown_kinds_are_listed(texts, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=all_of("declutr", "scd", "scl", "simcse")):
        config_of(texts, tmp_path / "run", {"kind": "simsce"})
