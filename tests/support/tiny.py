"""Tiny encoders of each family, and documents as the shards hold them."""

from dataclasses import replace
from itertools import count

import numpy as np
import pyarrow as pa
import torch
from families import PACKED, REFUSED, TRAINED

from declutr.pipeline.shards.windows import Geometry, document_windows, window_starts
from declutr.trainer.data.batches import RankBatch, SpanBatch
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.encoder import Encoder
from declutr.trainer.model.language_model import load_hf_config, load_model
from declutr.trainer.model.layouts import fitting_layout
from declutr.trainer.objectives.base import Gathered
from declutr.trainer.objectives.config import RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.objectives.declutr.spans import SpanCollator
from declutr.trainer.parallel.communicator import Communicator, shard
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

VOCAB_SIZE = 64
VOCABULARY = Vocabulary(size=VOCAB_SIZE, bos=0, eos=2, mask=63, special=(0, 1, 2, 3, 63))
# What an objective can be, for those who try them all.
HALF = {"mlm_probability": 0.5}
_BY_NAME = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss", "loss_arguments": {"temperature": 0.05}}
OBJECTIVES = {
    "both": {"masking": HALF},
    "unmasked anchors": {"masking": HALF, "contrast_unmasked_anchors": True},
    "mlm": {"terms": "mlm", "masking": HALF},
    "contrastive": {"terms": "contrastive"},
    "queue": {"masking": HALF, "queue_size": 13},
    "other documents": {"masking": HALF, "loss": {"exclude_same_document": True}},
    "sizes": {"masking": HALF, "queue_size": 13, "matryoshka": {"sizes": [3, "all", 7], "weights": [1, 0.5, 2]}},
    "by name": {"masking": HALF, "loss": _BY_NAME},
}
FAMILIES = {
    "roberta": {"model_type": "roberta", "type_vocab_size": 1, **PACKED["roberta"]},
    **{family: {"model_type": family, **PACKED[family]} for family in ("bert", "modernbert")},
}
_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}


def tiny_encoder(family="roberta", dtype=torch.float64, seed=0, **settings):
    """An encoder with weights large enough that every part of it matters. `settings` are EncoderConfig's."""
    scratch = {**FAMILIES[family], "initializer_range": 0.3, **settings.pop("from_config", {})}
    config = EncoderConfig(from_config=scratch, **{"dropout": 0.0, **settings})
    model = load_model(config, load_hf_config(config, VOCAB_SIZE, _IDS), seed)[0]
    encoder, generator = Encoder(config, model, seed).to(dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():  # biases start at 0 and norms at 1: move them, so that none is left out unnoticed
        for parameter in encoder.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return encoder.train()


def family_encoder(family, dtype=torch.float64, mlm=True, **settings):
    """An encoder of any tested family in the layout that fits it, which is found in float32 as in a run."""
    scratch = {"model_type": family, **(TRAINED | REFUSED)[family]}
    encoder = tiny_encoder("bert", torch.float32, from_config=scratch, **settings)
    encoder.set_layout(encoder.config.model_copy(update={"layout": fitting_layout(encoder, mlm=mlm)}))
    return encoder.to(dtype)


def random_spans(lengths, num_selected=0, seed=0):
    """Spans of ordinary tokens with these lengths, of which some are to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB_SIZE - 1, (sum(lengths),), generator=generator)
    selected = torch.randperm(len(ids), generator=generator)[:num_selected].sort().values
    labels = torch.randint(4, VOCAB_SIZE - 1, (len(selected),), generator=generator)
    keys = torch.randint(-(2**31), 2**31, (len(lengths),), generator=generator).to(torch.int32)
    return SpanBatch(ids, torch.tensor(lengths, dtype=torch.int64), selected, labels, keys)


# Two anchors of up to 12 tokens fit 48 tokens; the lengths are mixed, and both ranks of two get some of each.
SHORT_LENGTHS = {"fewer_anchors": [30, 48, 24, 131, 47], "shrink_spans": [20, 48, 12, 131, 47]}
SHORT_GEOMETRY = Geometry(num_anchors=2, max_tokens=12, min_tokens=3)
ID, TOKENS, NUM_TOKENS = ("id", pa.binary(16)), ("tokens", pa.list_(pa.uint16())), ("num_tokens", pa.int64())


def table_of(rows, *columns):
    """A table of rows of values; each column is given by its name and type."""
    return pa.table({name: pa.array([row[at] for row in rows], kind) for at, (name, kind) in enumerate(columns)})


def documents(lengths, max_tokens, seed=0, mode="drop"):
    """Shard rows with these numbers of tokens; a row's content depends on its own number and length alone."""
    rows = []
    for number, length in enumerate(lengths):
        rng, drop = np.random.default_rng([seed, number, length]), mode == "drop"
        windows = window_starts(length, max_tokens) if drop else document_windows(length, SHORT_GEOMETRY, mode)
        rows.append((rng.bytes(16), rng.integers(4, VOCAB_SIZE - 1, length), windows, length))
    return table_of(rows, ID, TOKENS, ("windows", pa.list_(pa.int32())), NUM_TOKENS)


def tiny_collator(objective=None, spans=None, seed=0, mode="drop"):
    spans = spans or SpanConfig(num_anchors=2, num_positives=2, min_tokens=3, max_tokens=12)
    return SpanCollator(objective or DeclutrConfig(), RunContext(seed, spans, short_documents=mode), VOCABULARY, 10)


def declutr(config=None, num_anchors=2, num_positives=2, size=32):
    spans = SpanConfig(num_anchors=num_anchors, num_positives=num_positives)
    return Declutr(config or DeclutrConfig(), RunContext(spans=spans), size)


def contrastive(objective, views):
    return objective.loss(Gathered(views))["contrastive"]


def rows_of(spans, num_rows):
    if not isinstance(spans, SpanBatch):
        spans = SpanBatch(*[torch.empty(0, dtype=torch.int64)] * 4)
    return RankBatch(spans, num_rows)


def tiny_train_step(encoder, objective=None, **settings):
    """A train step for 2 anchors with 2 positives each. `settings` are its own, its task's, `sharded` and `loss`."""
    optim = settings.pop("optim", OptimConfig(lr=1e-2, bias_correction=False))
    shape = {"num_anchors": settings.pop("num_anchors", 2), "num_positives": settings.pop("num_positives", 2)}
    loss = settings.pop("loss", None) or declutr(objective, **shape, size=encoder.embedding_size)
    settings["microbatch"] = Microbatch(settings.pop("microbatch_tokens", None))
    if settings.pop("sharded", False):
        shard(encoder, settings["comm"])
    own = {"optimizer": build_optimizer(optim, encoder, loss), "total_steps": 10}
    own |= {name: settings.pop(name) for name in ("optimizer", "total_steps", "late") if name in settings}
    task = TrainTask(**{"encoder": encoder, "objective": loss, "comm": Communicator(), "seed": 0, **settings})
    return TrainStep(tasks=(task,), optim=optim, **own)


def with_task(train_step, **changes):
    return replace(train_step, tasks=(replace(train_step.tasks[0], **changes),))


def run_out_of_memory(encoder, at, graph=True):
    """Makes forward number `at` of those with (or without) a graph fail once, as if memory ran out."""
    calls, forward = count(), encoder.forward

    def failing(*arguments):
        if torch.is_grad_enabled() == graph and next(calls) == at:
            raise torch.OutOfMemoryError("DefaultCPUAllocator: given to this test")
        return forward(*arguments)

    encoder.forward = failing


def rank_batch(collator, table, start=0, end=None, epoch=0):
    end = len(table) if end is None else end
    return collator.collate(table.slice(start, end - start), np.full(end - start, epoch))


def half_precision(dtype, encoder, batch):
    encoder.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        embeddings, mlm = encoder(batch)
    (embeddings.square().sum() + mlm).backward()
    return embeddings, torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
