"""A finished run without training: tiny shards, a checkpoint with random weights, its export."""

import tinyruns as runs
from shardfolders import write
from tiny import tiny_train_step
from transformers import AutoTokenizer

from declutr.pipeline.shards.manifest import data_hash, load_manifest
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer
from declutr.trainer.build import build_encoder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.checkpoints.weights import collect
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.run import data_folder
from declutr.trainer.train import run_training

STEPS = 6


def shards(folder):
    write(folder, vocab_size=261)
    tokenizer = train_tokenizer(["some words and others"] * 20, 300)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = load_manifest(folder).model_copy(update={"tokenizer": describe_tokenizer(tokenizer, "train")})
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


def config_of(data, run, **changes):
    spans = {"num_anchors": 1, "num_positives": 1, "min_tokens": 2, "max_tokens": 4}
    return runs.train_config(data, run, spans=spans, steps=STEPS, **changes)


def save(config, run, step=STEPS, seed=0):
    tokenizer = AutoTokenizer.from_pretrained(f"{config.data}/tokenizer")
    encoder = build_encoder(config.model_copy(update={"seed": seed}), tokenizer)
    objective = Declutr(config.objective, config.main.context("drop"), encoder.embedding_size)
    data = data_hash(load_manifest(data_folder(config.data, config.cache)))
    facts = {"config_hash": config.hash(), "data_hash": data, "scores": {}, "files": {}}
    state = RunState(step=step, documents=8 * step, world_size=1, **facts)
    return checkpoint.save(run / "checkpoints", state, collect([tiny_train_step(encoder, loss=objective)]))


def finish(folder):
    """Shards in `data` and a finished run in `run`; returns its configuration."""
    config = config_of(shards(folder / "data"), folder / "run")
    save(config, folder / "run")
    rows = [f'{{"kind": "step", "step": {step}, "loss": 1.0, "time": 1.0}}\n' for step in range(1, STEPS + 1)]
    (folder / "run" / "metrics.jsonl").write_text("".join(rows))
    run_training(config)
    return config
