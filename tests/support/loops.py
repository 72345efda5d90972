"""The loop of a worker without Ray, batches and validation, over a tiny encoder."""

import dataclasses

import numpy as np
import pyarrow as pa
import tinyruns as runs
import torch
from prepared import Row, write_prepared
from tiny import documents, rank_batch, tiny_collator, tiny_encoder, tiny_train_step

from declutr.pipeline.shards.manifest import data_hash, load_manifest
from declutr.trainer.checkpoints.state import joint_hash
from declutr.trainer.checkpoints.weights import collect
from declutr.trainer.data.stream import Prefetcher
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.step.step import NonFiniteLosses
from declutr.trainer.worker.checkpointing import Checkpointing
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.loop import TrainingLoop
from declutr.trainer.worker.loop import take as take_updates

RARE, BAD = 62, {2, 5}
"""A token whose embedding cannot be squared, so that its batch has a bad loss, and the steps that have such a batch."""


def four_documents(folder):
    write_prepared(folder, [[Row(f"words of a document, the {number}th of four") for number in range(4)]])
    return folder


def worker(run, comm=None, total_steps=6, **changes):
    config = runs.least_config(**{"run": str(run), "data": str(run / "data"), "on_nonfinite_loss": "skip"} | changes)
    encoder = tiny_encoder()
    with torch.no_grad():
        encoder.model.base_model.embeddings.word_embeddings.weight[RARE] = 1e200
    objective = DeclutrConfig(terms="contrastive", queue_size=6)
    train_step = tiny_train_step(encoder, objective, comm=comm or Communicator(), total_steps=total_steps)
    skips = NonFiniteLosses(config.on_nonfinite_loss == "skip", config.max_skipped_steps)
    return loop_of(config, run, dataclasses.replace(train_step, nonfinite_losses=skips), run / "data")


def loop_of(config, run, train_step, data):
    heartbeat, hashes = Heartbeat(train_step.comm.rank, train_step.comm.size), {"": data_hash(load_manifest(data))}
    identity = {"config_hash": config.hash(), "data_hash": joint_hash(hashes)}
    checkpointing = Checkpointing(config, run, identity, hashes, [train_step], heartbeat)
    parts = {"prefetch": lambda _: Prefetcher(iter(())), "validator": None, "stop": lambda: False}
    parts |= {"heartbeat": heartbeat, "began": 0.0}
    return TrainingLoop(config, run, torch.device("cpu"), [train_step], checkpointing, **parts)


def nothing():
    """No metrics are written before a checkpoint."""


def batch(step, comm=None, bad=BAD):
    table = documents([60, 50, 70, 55], 12, seed=step)
    clean = [np.where(np.array(row) == RARE, 4, row).tolist() for row in table["tokens"].to_pylist()]
    if step in bad:
        clean[0] = [RARE] * len(clean[0])
    table = table.set_column(1, "tokens", pa.array(clean, pa.list_(pa.uint16())))
    size, rank = (comm.size, comm.rank) if comm else (1, 0)
    collator = tiny_collator(DeclutrConfig(terms="contrastive"))
    return rank_batch(collator, table, rank * 4 // size, (rank + 1) * 4 // size)


def take(loop, first, last, comm=None, bad=BAD):
    return [take_updates(loop.train_steps, {"": batch(step, comm, bad)}, step) for step in range(first, last + 1)]


def tensors(loop):
    contents = collect([loop.train_step])
    return {f"{file}:{name}": tensor for file, named in contents.items() for name, tensor in named.items()}


def same(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)
