"""Takes train steps on a fake GPU, one case after the other, and prints what became of each as JSON.

PYTHONPATH=tests/support:tests/cuda:. python tests/cuda/steps.py LIBRARY
"""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import fakegpu

if __name__ == "__main__":
    fakegpu.load(sys.argv[1])

import numpy as np
import torch
import torch.distributed as dist
from rows import clip_rows, image_rows, text_rows
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.workload import SIZES, Workload
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model.attention import Kernels, attend
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.objectives.text_config import ScdConfig, SclConfig, SimcseConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import GlobalCounts, GradCache, Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

GPU, ROWS, WORKERS = torch.device("cuda", 0), 8, Communicator(rank=1, size=4)
MASKS, PATCHES = MaskConfig(freq_mask=48, time_mask=192), FrontendConfig(patch_size=(24, 24), positions=False)
COLLATORS = {
    "images": ClipCollator(SupconConfig(), FrontendConfig(), 0),
    "audio": ClipCollator(SupconConfig(masks=MASKS), PATCHES, 0),
}
"""Those of VisualCSE and AudioCSE."""
OBJECTIVES = {"simcse": SimcseConfig(), "scd": ScdConfig(dropout_rates=(0.05, 0.15)), "scl": SclConfig(max_tokens=128)}


@dataclass(frozen=True)
class TextWorkload(Workload):
    """Encoder and rows of SimCSE, SCD or SCL: sentences, or premises with a hypothesis of each label."""

    def rows(self, first: int, count: int) -> Any:
        """Texts of 4 to 40 tokens."""
        pairs = "sentences" not in self.objective.reads
        lengths = [4 + 36 * number // count for number in range(count)]
        return text_rows([[(n, -1), *((n, label) for label in range(3 * pairs))] for n in lengths], first)


@dataclass(frozen=True)
class ClipWorkload(Workload):
    """Encoder, rows and frontend of VisualCSE's or AudioCSE's task; `spans` has no effect."""

    content: str = "images"

    def batch(self, first: int, count: int) -> RankBatch:
        """A batch of made-up images of 341 x 256 pixels, or of sounds from 0.3 s on, each 1.2 s longer."""
        images = self.content == "images"
        rows = image_rows([(341, 256)] * count) if images else clip_rows([30 + 120 * n for n in range(count)], mels=128)
        return COLLATORS[self.content].collate(rows, np.full(count, first))

    def frontend(self) -> Frontend:
        """The frontend, with weights drawn from the seed; a sound has places for 1,024 frames."""
        config = COLLATORS[self.content].frontend
        high, wide = config.patch_size
        shape, normal = (high * wide, (1024 // high) * (128 // wide)), (0.0, 1.0)
        if self.content == "images":
            shape, normal = (3 * high * wide, (config.image_size // high) * (config.image_size // wide)), (0.5, 0.5)
        return Frontend(config, *shape, int(SIZES[self.size]["hidden_size"]), self.seed, normal)


@dataclass(frozen=True)
class Case:
    """A train step of the tasks of some workloads, which train the encoder of the first.

    `kernel`: attention is the kernel of a GPU; else groups of spans. `reduce`: sums of gradients, after the backward,
    `overlapped` (in the type `compressed`) or `deterministic`.
    """

    workloads: tuple[Workload, ...]
    tokens: int | None = None
    comm: Communicator = field(default_factory=Communicator)
    kernel: bool = True
    late: bool = True
    reduce: str = ""
    compressed: torch.dtype | None = None
    shared_rows: int = 1024
    optim: OptimConfig = field(default_factory=OptimConfig)


def spans(attention: float = 0.0, pooling: Any = "mean", half: bool = True, **objective: Any) -> Workload:
    """DeCLUTR on documents."""
    settings = {"pooling": pooling, "autocast": torch.bfloat16 if half else None, "dropout": 0.1}
    settings |= {"attention_dropout": attention, "objective": DeclutrConfig(**objective)}
    return Workload("tiny", SpanConfig(min_tokens=16, max_tokens=64), 0, **settings)


ARGUMENTS = argparse.Namespace(model="tiny", spans=[16, 64], seed=0), "cpu", "bf16"


def texts(kind: str) -> TextWorkload:
    """SimCSE, SCD or SCL, with dropped attention weights as in their papers."""
    return TextWorkload.of(*ARGUMENTS, objective=OBJECTIVES[kind], dropout=0.1, attention_dropout=0.1, pooling="cls")


def clips(content: Any) -> ClipWorkload:
    """VisualCSE's or AudioCSE's task on images or sounds."""
    settings = {"dropout": 0.1, "attention_dropout": 0.0, "pooling": "cls"}
    return ClipWorkload.of(*ARGUMENTS, objective=SupconConfig(), content=content, **settings)


BY_NAME = {"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}
EXACT = replace(WORKERS, deterministic=True)
CASES = {
    "declutr": Case((spans(),)), "declutr, attention dropout": Case((spans(attention=0.1),)),
    "declutr, attention dropout in groups": Case((spans(attention=0.1),), kernel=False),
    "declutr, float32 in groups": Case((spans(half=False),), kernel=False),
    "declutr, cls": Case((spans(pooling="cls"),)), "declutr, microbatches": Case((spans(),), tokens=200),
    "declutr, microbatches, attention dropout": Case((spans(attention=0.1),), tokens=200),
    "declutr, mlm alone": Case((spans(terms="mlm"),)),
    "declutr, mlm alone, microbatches": Case((spans(terms="mlm"),), tokens=200),
    "declutr, contrastive alone": Case((spans(terms="contrastive"),)),
    "declutr, unmasked anchors": Case((spans(contrast_unmasked_anchors=True),)),
    "declutr, no bias correction": Case((spans(),), optim=OptimConfig(bias_correction=False)),
    "declutr, queue": Case((spans(queue_size=64),), late=False),
    "declutr, a loss by name": Case((spans(loss=BY_NAME),), late=False),
    **{kind: Case((texts(kind),)) for kind in OBJECTIVES},
    **{f"{kind}, in groups": Case((texts(kind),), kernel=False) for kind in OBJECTIVES},
    **{f"{kind}, microbatches": Case((texts(kind),), tokens=100) for kind in OBJECTIVES},
    **{content: Case((clips(content),)) for content in ("images", "audio")},
    **{f"{content}, microbatches": Case((clips(content),), tokens=500) for content in ("images", "audio")},
    "simcse and images": Case((texts("simcse"), clips("images"))), "4 workers": Case((spans(),), comm=WORKERS),
    "4 workers, overlapped": Case((spans(),), comm=WORKERS, reduce="overlapped"),
    "4 workers, overlapped, microbatches": Case((spans(),), comm=WORKERS, reduce="overlapped", tokens=200),
    "4 workers, overlapped in bfloat16": Case((spans(),), comm=WORKERS, reduce="overlapped", compressed=torch.bfloat16),
    "4 workers, deterministic": Case((spans(),), comm=EXACT, reduce="deterministic", late=False),
    "4 workers, share": Case((spans(),), comm=WORKERS, shared_rows=1),
    **{f"4 workers, {kind}, share": Case((texts(kind),), comm=WORKERS, shared_rows=1) for kind in OBJECTIVES},
    "4 workers, images, share": Case((clips("images"),), comm=WORKERS, shared_rows=1),
}  # fmt: skip


def train_step(case: Case, gpu: Any) -> TrainStep:
    first = case.workloads[0]
    encoder = gpu.moved(first.encoder())
    dropping = importlib.import_module("declutr.trainer.model.span_attention").attend_spans
    for drops in (False, True):
        encoder._kernels[GPU, drops] = Kernels(attend, dropping) if case.kernel else None
    tasks, modules = [], list[nn.Module]()
    for number, one in enumerate(case.workloads):
        objective = gpu.moved(one.loss(encoder.embedding_size))
        frontend = gpu.moved(one.frontend()) if isinstance(one, ClipWorkload) else None
        modules += [each for each in (objective, frontend) if each is not None]
        parts = {"encoder": encoder, "objective": objective, "frontend": frontend, "comm": case.comm}
        settings = {"microbatch": Microbatch(case.tokens), "autocast": one.autocast, "shared_rows": case.shared_rows}
        tasks.append(TrainTask(**parts, **settings, seed=number, name=f"task{number}" if number else ""))
    optimizer = build_optimizer(case.optim, encoder, *modules, fused=True)
    if case.reduce == "overlapped":
        body = list(encoder.model.base_model.parameters())
        heads = [p for p in encoder.parameters() if id(p) not in {id(one) for one in body}]
        tasks[-1] = replace(tasks[-1], overlap=BucketedReducer([*heads, *body], case.compressed, 2**14))
    elif case.reduce:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tasks = [replace(one, reducer=FixedPointReducer(case.comm, parameters, 8)) for one in tasks]
    return TrainStep(tasks=tuple(tasks), optimizer=optimizer, optim=case.optim, total_steps=100, late=case.late)


@contextmanager
def equal_workers() -> Iterator[None]:
    """The counts of workers that have as many rows as this one; their exchange has no values."""

    def count(passes: GradCache, failed: bool = False) -> GlobalCounts | None:
        size, rows = passes.task.comm.size, passes.batch.num_rows
        assert not failed
        return GlobalCounts(len(passes.batch.spans.labels) * size, rows * passes.task.comm.rank, rows * size)

    with patch.object(GradCache, "count", count):
        yield


def result(case: Case) -> dict[str, Any]:
    """Waits of the second step, `error`, and the number of parameters of the encoder that have a gradient."""
    batches = [workload.batch(0, ROWS) for workload in case.workloads]
    with fakegpu.fake_gpu() as gpu:
        try:
            runner = train_step(case, gpu)
            inputs = {task.name: batch.to(GPU) for task, batch in zip(runner.tasks, batches, strict=True)}
            for step in (1, 2):
                gpu.waits.clear()
                pending = runner.begin(inputs, step)
            waits = sorted(gpu.waits)
            pending.read()
        except Exception as error:  # noqa: BLE001 - the test shows it
            return {"error": f"{type(error).__name__}: {error}"[:500], "waits": sorted(gpu.waits)}
        gradients = sum(parameter.grad is not None for parameter in runner.encoder.parameters())
    return {"waits": waits, "gradients": gradients}


if __name__ == "__main__":
    assert SIZES["tiny"]["num_hidden_layers"] == 2
    dist.init_process_group("fake", store=FakeStore(), rank=WORKERS.rank, world_size=WORKERS.size)
    with equal_workers():
        results = {name: result(case) for name, case in CASES.items() if len(sys.argv) < 3 or name in sys.argv[2:]}
    sys.stdout.write(json.dumps(results))
