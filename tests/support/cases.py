"""Objectives over made-up rows, alone or as tasks of one run, and their train steps on any worker."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rows import Rows, clip_rows, image_rows, sentences, text_rows
from tiny import HALF, OBJECTIVES, SHORT_LENGTHS, VOCABULARY, documents, tiny_encoder

from declutr.trainer.build import used_parameters
from declutr.trainer.data.batches import collated
from declutr.trainer.data.chunks import fetched
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.data.plan import Plan
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import Frontend, embedding_width
from declutr.trainer.objectives.base import SHARED_ROWS, implementation_of
from declutr.trainer.objectives.config import ObjectiveConfig, RunContext, SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.declutr.objective import Declutr
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.parallel.communicator import Communicator, shard
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

_SPANS = SpanConfig(num_anchors=2, num_positives=2, min_tokens=3, max_tokens=12)


@dataclass(frozen=True)
class Source:
    config: ObjectiveConfig
    rows: pa.Table
    mode: Any = "drop"  # for short documents
    frontend: FrontendConfig | None = None
    shape: tuple = ()  # of a frontend: values of a patch, patches of a clip, and mean and deviation of values
    spans: SpanConfig = _SPANS
    vocabulary: Vocabulary = VOCABULARY


@dataclass(frozen=True)
class Case:
    """The sources of a run by the names of their tasks; the main one has no name."""

    sources: dict[str, Source]
    joint: bool = True  # one update of all tasks; else each has its own
    encoder: dict[str, Any] = field(default_factory=dict)


SENTENCES = sentences([5, 12, 30, 7, 3, 1, 18])
PAIRS = text_rows([
    [(5, -1), (4, 0), (9, 2), (3, 1)], [(11, -1), (6, 2), (2, 0)], [(3, -1), (7, 0), (5, 0), (8, 2), (30, 1)],
    [(9, -1), (1, 2), (4, 0)], [(2, -1), (5, 0), (7, 2)],
])  # fmt: skip
ASKING = {"vocabulary": replace(VOCABULARY, prompt=(40,), query_prompt=(41, 42))}
_SIZES = {"sizes": [4, "all", 9], "weights": [0.5, 1.0, 2.0]}
_COPIES = {"mlm_loss_weight": 0.1, "masking": HALF, "temperature": 0.2}
TEXTS = {
    "simcse": Source(SimcseConfig(temperature=0.2), SENTENCES),
    "simcse with mlm": Source(SimcseConfig(**_COPIES), SENTENCES),
    "simcse with mlm on all copies": Source(SimcseConfig(supervised=True, mlm_copies="all", **_COPIES), PAIRS),
    "simcse supervised": Source(SimcseConfig(supervised=True, temperature=0.2, hard_negative_weight=0.7), PAIRS),
    "simcse of pairs": Source(SimcseConfig(supervised=True, hard_negatives=False, temperature=0.2), PAIRS, **ASKING),
    "scd": Source(ScdConfig(projector=[12, 8], decorrelation_weight=0.5), SENTENCES),
    "scd, attention apart": Source(ScdConfig(projector=[6], attention_dropout_rates=(0.2, 0.0)), SENTENCES),
    "scl": Source(SclConfig(contrastive_weight=0.4), PAIRS),
    "simcse with sizes": Source(SimcseConfig(temperature=0.2, matryoshka=_SIZES), SENTENCES),
    "simcse supervised with sizes": Source(SimcseConfig(supervised=True, temperature=0.2, matryoshka=_SIZES), PAIRS),
    "scd with sizes": Source(ScdConfig(projector=[12, 8], decorrelation_weight=0.5, matryoshka=_SIZES), SENTENCES),
    "scl with sizes": Source(SclConfig(contrastive_weight=0.4, matryoshka=_SIZES), PAIRS),
    "scl with draws": Source(SclConfig(contrastive_weight=0.4, positives=2, negatives=3), PAIRS),
}
_MASKS, _MEDIA_SIZES = MaskConfig(freq_mask=2, time_mask=3), {"sizes": [5, "all"], "weights": [0.3, 1.0]}
_MEDIA = SupconConfig(temperature=0.2, masks=_MASKS, mixup=0.6, matryoshka=_MEDIA_SIZES)
_IMAGES, _CLIPS = image_rows([(12, 10), (9, 9), (8, 15), (20, 8)]), clip_rows([9, 4, 13, 2, 7])
_PATCHES, _FRAMES = FrontendConfig(patch_size=(4, 4), image_size=8), FrontendConfig(patch_size=(3, 2), positions=False)
AUXILIARY = {
    "image": Source(_MEDIA, _IMAGES, frontend=_PATCHES, shape=(48, 4, (0.5, 0.5))),
    "audio": Source(_MEDIA, _CLIPS, frontend=_FRAMES, shape=(6, 12, (0.0, 1.0))),
    "more": Source(SimcseConfig(), sentences([4, 9, 6, 11], seed=1)),
}
LENGTHS, PROJECTION = [48, 70, 49, 131, 60], {"projection": {"kind": "mlp", "size": 6}}


def of_documents(objective, mode="drop", number=5):
    rows = documents(SHORT_LENGTHS.get(mode, LENGTHS)[:number], 12, mode=mode)
    return Case({"": Source(DeclutrConfig(**OBJECTIVES[objective]), rows, mode)}, encoder=PROJECTION)


def of_queries(mode="drop"):
    """DeCLUTR, half of whose anchors are queries with a prompt of their own."""
    spans = _SPANS.model_copy(update={"query_share": 0.5, "query_tokens": (1, 3)})
    rows = documents(SHORT_LENGTHS.get(mode, LENGTHS), 12, mode=mode)
    return Case({"": Source(DeclutrConfig(**OBJECTIVES["both"]), rows, mode, spans=spans, **ASKING)})


def of_tasks(*names, joint):
    return Case({"": Source(SimcseConfig(), sentences([5, 12, 9, 7, 3]))} | {n: AUXILIARY[n] for n in names}, joint)


CASES = {
    **{name: Case({"": source}) for name, source in TEXTS.items()},
    "scl": Case({"": TEXTS["scl"]}, encoder={"pooling": "mean_without_cls"}),
    "image, joint": of_tasks("image", joint=True),
    "audio and image, alternating": of_tasks("audio", "image", joint=False),
    "texts and audio, joint": of_tasks("more", "audio", joint=True),
    "declutr, queries": of_queries(),
    **{f"declutr, queries, {mode}": of_queries(mode) for mode in SHORT_LENGTHS},
    **{f"declutr, {name}": of_documents(name) for name in OBJECTIVES},
    **{f"declutr, {name}, {mode}": of_documents(name, mode) for name in OBJECTIVES for mode in SHORT_LENGTHS},
    # with 3 workers one has no document
    **{f"declutr, {name} of two": of_documents(name, number=2) for name in ("both", "mlm", "by name")},
    **{f"declutr of two, {mode}": of_documents("both", mode, 2) for mode in SHORT_LENGTHS},
}


def task_of(encoder, name, source, comm=None, **settings):
    context = RunContext(len(name), source.spans, len(source.rows), source.mode, source.frontend)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3 + len(name))
        objective = implementation_of(source.config)(source.config, context, encoder.embedding_size).double().train()
    if isinstance(objective, Declutr) and source.config.queue_size:
        generator = torch.Generator().manual_seed(5)
        objective.queue = torch.randn(9, encoder.embedding_size, generator=generator, dtype=torch.float64)
    frontend = None
    if source.frontend is not None:
        values, places, normal = source.shape
        frontend = Frontend(source.frontend, values, places, embedding_width(encoder.model), 5, normal).double()
    settings |= {"comm": comm or Communicator(), "seed": context.seed, "name": name, "frontend": frontend}
    return TrainTask(encoder=encoder, objective=objective, **settings)


def train_steps_of(
    case, comm=None, tokens=None, sharded=False, shared_rows=SHARED_ROWS, norm=1.0, weight=0.7, lr=1e-2, **settings
):
    """The train steps of a case as `build_train_steps` makes them, on one encoder, whose are the other settings.

    `tokens` limits a microbatch, `norm` the gradient; `weight` and `lr` are of auxiliary tasks.
    """
    encoder = tiny_encoder(**({"dropout": 0.2, "attention_dropout": 0.1} | case.encoder | settings))
    own, sources = {"microbatch": Microbatch(tokens), "shared_rows": shared_rows}, case.sources.items()
    tasks = [task_of(encoder, n, source, comm, weight=weight if n else 1.0, **own) for n, source in sources]
    if sharded:
        shard(encoder, tasks[0].comm)
    train_steps = []
    for group in [tasks] if case.joint else [[task] for task in (*tasks[1:], tasks[0])]:
        optim = OptimConfig(lr=lr if group[0].name else 1e-2, max_grad_norm=norm)
        modules = [part for task in group for part in (task.objective, task.frontend) if part is not None]
        optimizer = build_optimizer(optim, encoder, *modules, reached=used_parameters(encoder, group))
        train_steps.append(TrainStep(tasks=tuple(group), optimizer=optimizer, optim=optim, total_steps=10))
    return train_steps


def collator_of(task, vocabulary=VOCABULARY):
    return task.objective.collator(vocabulary, 10 if isinstance(task.objective, Declutr) else 30)


def rows_of(task, source, start, end, epoch):
    epochs, fetch = np.full(end - start, epoch), getattr(collator_of(task, source.vocabulary), "fetch", None)
    return fetched(Rows(source.rows), np.arange(start, end), epochs, fetch)


def batch_of(case, train_steps, epoch=1, unit=None):
    """This worker's share of each task's batch; with `unit` in canonical microbatches of as many documents."""
    batch = {}
    for task in (task for train_step in train_steps for task in train_step.tasks):
        source, total = case.sources[task.name], len(case.sources[task.name].rows)
        start, end = Plan(0, total, total, unit).slice(task.comm.rank, task.comm.size)
        rows, epochs = rows_of(task, source, start, end, epoch), np.full(end - start, epoch)
        batch[task.name] = collated(collator_of(task, source.vocabulary), rows, epochs, start, unit)
    return batch
