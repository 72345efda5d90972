"""Takes train steps on a fake GPU, one case after the other, and prints what became of each as JSON.

PYTHONPATH=tests/support:tests/cuda:. python tests/cuda/steps.py LIBRARY
"""

import argparse
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import fakegpu

if __name__ == "__main__":
    fakegpu.load(sys.argv[1])

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.workload import OBJECTIVES, SIZES, Workload
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.model.attention import Kernels, attend
from declutr.trainer.model.config import FrontendConfig
from declutr.trainer.model.frontend import Frontend
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.config import DeclutrConfig
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.objectives.supcon.config import MaskConfig, SupconConfig
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.parallel.reducers import BucketedReducer, FixedPointReducer
from declutr.trainer.step.config import OptimConfig
from declutr.trainer.step.gradcache import GlobalCounts, GradCache, Microbatch
from declutr.trainer.step.optim import build_optimizer
from declutr.trainer.step.step import TrainStep
from declutr.trainer.step.task import TrainTask

GPU = torch.device("cuda", 0)
ROWS = 8
WORKERS = Communicator(rank=1, size=4)


def made_up(content, count, seed):
    """Rows of images of 341 x 256 pixels or of sounds, and the collator of VisualCSE or AudioCSE."""
    generator = np.random.default_rng(seed)
    columns = {
        "id": pa.array([generator.bytes(16) for _ in range(count)], pa.binary(16)),
        "label": pa.array([str(number % 10) for number in range(count)]),
    }
    if content == "images":
        pixels = [generator.integers(0, 256, (256, 341, 3), dtype=np.uint8) for _ in range(count)]
        stored = [io.BytesIO() for _ in range(count)]
        for image, file in zip(pixels, stored, strict=True):
            Image.fromarray(image).save(file, "PNG", compress_level=0)
        columns["image"] = pa.array([file.getvalue() for file in stored], pa.binary())
        columns |= {key: pa.array([size] * count, pa.int32()) for key, size in (("width", 341), ("height", 256))}
        return pa.table(columns), ClipCollator(SupconConfig(), FrontendConfig(), seed)
    sizes = generator.integers(30, 1023, count).tolist()
    frames = [generator.normal(-4, 4, size * 128).astype(np.float32) for size in sizes]
    columns |= {"frames": pa.array(frames, pa.list_(pa.float32())), "num_frames": pa.array(sizes, pa.int32())}
    objective = SupconConfig(masks=MaskConfig(freq_mask=48, time_mask=192))
    return pa.table(columns), ClipCollator(objective, FrontendConfig(patch_size=(24, 24), positions=False), seed)


@dataclass(frozen=True)
class ClipWorkload(Workload):
    """Encoder, rows and frontend of VisualCSE's or AudioCSE's task; `spans` has no effect."""

    content: str = "images"

    def batch(self, first: int, count: int) -> RankBatch:
        """A batch of made-up images, or of sounds of 0.3 to 10.24 s."""
        rows, collator = made_up(self.content, count, self.seed + first)
        return collator.collate(rows, np.zeros(count, np.int64))

    def frontend(self) -> Frontend:
        """The frontend, with weights drawn from the seed; a sound has places for 1,024 frames."""
        config = made_up(self.content, 0, 0)[1].frontend
        high, wide = config.patch_size
        shape, normal = (high * wide, (1024 // high) * (128 // wide)), (0.0, 1.0)
        if self.content == "images":
            shape, normal = (3 * high * wide, (config.image_size // high) * (config.image_size // wide)), (0.5, 0.5)
        return Frontend(config, *shape, int(SIZES[self.size]["hidden_size"]), self.seed, normal)


@dataclass(frozen=True)
class Case:
    """A train step.

    Attributes:
        workloads: encoder, objective and batch of each task; all train the encoder of the first.
        tokens: limit of a microbatch.
        comm: the workers; each has as many rows as this one.
        kernel: attention is the kernel of a GPU; else groups of spans.
        late: metrics are read after the next step has started.
        reduce: sums of gradients: after the backward, `overlapped`, or `deterministic`.
        compressed: type of overlapped sums.
        shared_rows: views above which each worker computes a share of the loss.
        optim: settings of the optimizer.
        mistake: a module in place of the projection that does what must not be.
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
    mistake: nn.Module | None = None


def spans(attention: float = 0.0, pooling: Any = "mean", half: bool = True, **objective: Any) -> Workload:
    """DeCLUTR on documents."""
    return Workload(
        "tiny",
        SpanConfig(min_tokens=16, max_tokens=64),
        0,
        objective=DeclutrConfig(**objective),
        dropout=0.1,
        attention_dropout=attention,
        pooling=pooling,
        autocast=torch.bfloat16 if half else None,
    )


def texts(kind: str) -> Workload:
    """SimCSE, SCD or SCL, with dropped attention weights as in their papers."""
    given = argparse.Namespace(model="tiny", spans=[16, 64], seed=0)
    return Workload.of(
        given, "cpu", "bf16", objective=OBJECTIVES[kind], dropout=0.1, attention_dropout=0.1, pooling="cls"
    )


def clips(content: Any) -> ClipWorkload:
    """VisualCSE's or AudioCSE's task on images or sounds."""
    given = argparse.Namespace(model="tiny", spans=[16, 64], seed=0)
    return ClipWorkload.of(
        given, "cpu", "bf16", objective=SupconConfig(), dropout=0.1, attention_dropout=0.0, pooling="cls",
        content=content,
    )  # fmt: skip


class Mistake(nn.Module):
    """Changes embeddings in a way that a GPU forbids or waits for."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, embeddings: Tensor) -> Tensor:
        """The changed embeddings."""
        return self.change(embeddings)


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "a tensor of the CPU": lambda each: each + torch.zeros(each.shape[-1]),
    "lengths on the CPU": lambda each: torch.segment_reduce(
        each, "mean", lengths=torch.ones(len(each), dtype=torch.int64), axis=0, unsafe=True
    ),
    "a read": lambda each: each if each.sum().item() else each * 2,
    "a condition": lambda each: each if (each > 0).any() else each * 2,
    "places of a mask": lambda each: each + each[each[:, 0] > 0].sum(),
    "an index on the CPU": lambda each: each[torch.arange(len(each))],
    "an upload that blocks": lambda each: each * torch.tensor([1.0], device=each.device),
}

CASES = {
    "declutr": Case((spans(),)),
    "declutr, attention dropout": Case((spans(attention=0.1),)),
    "declutr, attention dropout in groups": Case((spans(attention=0.1),), kernel=False),
    "declutr, float32 in groups": Case((spans(half=False),), kernel=False),
    "declutr, cls": Case((spans(pooling="cls"),)),
    "declutr, microbatches": Case((spans(),), tokens=200),
    "declutr, microbatches, attention dropout": Case((spans(attention=0.1),), tokens=200),
    "declutr, mlm alone": Case((spans(terms="mlm"),)),
    "declutr, mlm alone, microbatches": Case((spans(terms="mlm"),), tokens=200),
    "declutr, contrastive alone": Case((spans(terms="contrastive"),)),
    "declutr, unmasked anchors": Case((spans(contrast_unmasked_anchors=True),)),
    "declutr, no bias correction": Case((spans(),), optim=OptimConfig(bias_correction=False)),
    "declutr, queue": Case((spans(queue_size=64),), late=False),
    "declutr, a loss by name": Case(
        (spans(loss={"kind": "pytorch_metric_learning", "loss": "NTXentLoss"}),), late=False
    ),
    **{kind: Case((texts(kind),)) for kind in OBJECTIVES},
    **{f"{kind}, in groups": Case((texts(kind),), kernel=False) for kind in OBJECTIVES},
    **{f"{kind}, microbatches": Case((texts(kind),), tokens=100) for kind in OBJECTIVES},
    **{content: Case((clips(content),)) for content in ("images", "audio")},
    **{f"{content}, microbatches": Case((clips(content),), tokens=500) for content in ("images", "audio")},
    "simcse and images": Case((texts("simcse"), clips("images"))),
    "4 workers": Case((spans(),), comm=WORKERS),
    "4 workers, overlapped": Case((spans(),), comm=WORKERS, reduce="overlapped"),
    "4 workers, overlapped, microbatches": Case((spans(),), comm=WORKERS, reduce="overlapped", tokens=200),
    "4 workers, overlapped in bfloat16": Case((spans(),), comm=WORKERS, reduce="overlapped", compressed=torch.bfloat16),
    "4 workers, deterministic": Case(
        (spans(),), comm=replace(WORKERS, deterministic=True), reduce="deterministic", late=False
    ),
    "4 workers, share": Case((spans(),), comm=WORKERS, shared_rows=1),
    **{f"4 workers, {kind}, share": Case((texts(kind),), comm=WORKERS, shared_rows=1) for kind in OBJECTIVES},
    "4 workers, images, share": Case((clips("images"),), comm=WORKERS, shared_rows=1),
    **{f"mistake: {name}": Case((spans(),), mistake=Mistake(change)) for name, change in MISTAKES.items()},
}


def train_step(case: Case, gpu: Any) -> TrainStep:
    """The train step, with everything on the GPU."""
    first = case.workloads[0]
    encoder = gpu.moved(first.encoder())
    if case.mistake is not None:
        encoder.projection = case.mistake
    dropping = importlib.import_module("declutr.trainer.model.dropout_attention").attend_dropout
    for drops in (False, True):
        encoder._kernels[GPU, drops] = Kernels(attend, dropping) if case.kernel else None
    tasks, modules = [], list[nn.Module]()
    for number, one in enumerate(case.workloads):
        objective = gpu.moved(one.loss(encoder.embedding_size))
        frontend = gpu.moved(one.frontend()) if isinstance(one, ClipWorkload) else None
        modules += [each for each in (objective, frontend) if each is not None]
        tasks.append(
            TrainTask(
                encoder=encoder,
                objective=objective,
                comm=case.comm,
                seed=number,
                microbatch=Microbatch(case.tokens),
                autocast=one.autocast,
                name=f"task{number}" if number else "",
                frontend=frontend,
                shared_rows=case.shared_rows,
            )
        )
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
        size, rows = passes.comm.size, passes.batch.num_rows
        assert not failed
        return GlobalCounts(len(passes.batch.spans.labels) * size, rows * passes.comm.rank, rows * size)

    with patch.object(GradCache, "count", count):
        yield


def result(case: Case) -> dict[str, Any]:
    """Waits of the second step, `error`, and the number of parameters of the encoder that have a gradient."""
    batches = [workload.batch(0, ROWS) for workload in case.workloads]
    with fakegpu.fake_gpu() as gpu:
        try:
            made = train_step(case, gpu)
            given = {task.name: batch.to(GPU) for task, batch in zip(made.tasks, batches, strict=True)}
            for step in (1, 2):
                gpu.waits.clear()
                pending = made.begin(given, step)
            waits = sorted(gpu.waits)
            pending.read()
        except Exception as error:  # noqa: BLE001 - the test shows it
            return {"error": f"{type(error).__name__}: {error}"[:500], "waits": sorted(gpu.waits)}
        gradients = sum(each.grad is not None for each in made.encoder.parameters())
    return {"waits": waits, "gradients": gradients, "parameters": len(list(made.encoder.parameters()))}


def main() -> None:
    """Takes every case."""
    assert SIZES["tiny"]["num_hidden_layers"] == 2
    dist.init_process_group("fake", store=FakeStore(), rank=WORKERS.rank, world_size=WORKERS.size)
    with equal_workers():
        found = {name: result(case) for name, case in CASES.items() if len(sys.argv) < 3 or name in sys.argv[2:]}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
