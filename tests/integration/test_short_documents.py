"""Shards of mixed documents, made by the pipeline: the trainer follows them."""

import random

import numpy as np
import pytest
import tinyruns as runs
import torch
from messages import says
from preparing import prepare_rows
from tinyruns import problems, span_validator

from declutr.inspection.describe import describe
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.build import build_encoder, build_objective, load_tokenizer, max_content

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
    assert held_out.reached[torch.tensor(lengths >= 3 * 16)].all()
    assert (validator.scores(encoder)["distant_share"] < 1) == (mode == "fewer_anchors")
