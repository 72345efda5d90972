"""Needs of a run of 10**9 documents on 1,024 ranks (memory, time, disk, network), as far as one machine can measure.

    python -m benchmarks.scale --json OUT [--documents 1000000000] [--ranks 1024] [--shards 100000] [--batch 16384]

The plan, the manifest and the reading of documents run at full size (the shards are links to the same bytes). The loss,
checkpoints and Ray's tasks are measured at sizes that fit here and extrapolated by their formulas. Every figure carries
its kind: measured, computed from measured ones, or assumed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from safetensors.torch import load_file

from benchmarks import record
from benchmarks.record import figure
from benchmarks.scale.control import control_figures
from benchmarks.scale.loss import loss_figures
from benchmarks.scale.shards import make_shards
from benchmarks.workload import models
from declutr.common.session import start_ray
from declutr.pipeline.job.units import MOST_UNITS
from declutr.pipeline.readers.corpus import UNIT_MIB
from declutr.pipeline.shards.shards import MOST_OPEN, ShardSet, check_shards, load_manifest
from declutr.trainer.checkpoints.state import has_checksum
from declutr.trainer.checkpoints.tensorfile import write_tensors
from declutr.trainer.data.chunks import rank_plan
from declutr.trainer.data.plan import Plan, permute

_MIB = 2**20
_PARTS = ("plan", "manifest", "loss", "checkpoint", "ray", "control")
_CHUNK_DOCUMENTS = 1024  # per reading task, as in trainer/data/stream.py


def timed(work: Callable[[], Any], elapsed: bool = False) -> tuple[Any, float, float]:
    """Return the result, seconds, and the growth of this process in MiB.

    Seconds are processor time of one thread; `elapsed` measures wall time, for work that waits for disks or processes.
    """
    process, clock = psutil.Process(), time.perf_counter if elapsed else time.process_time
    before, begun = process.memory_info().rss, clock()
    result = work()
    return result, clock() - begun, (process.memory_info().rss - before) / _MIB


def plan_figures(given: argparse.Namespace) -> dict[str, Any]:
    """Check the order at full size, and measure its cost.

    Raises:
        RuntimeError: a document occurs twice in a batch or a region, or the inverse does not return a number.
    """
    plan = Plan(given.seed, given.documents, given.batch)
    steps = given.documents // given.batch
    whole = plan.documents(0, 1)[1]
    ranks = [plan.slice(rank, given.ranks) for rank in range(given.ranks)]
    slices, all_ranks, _ = timed(lambda: [plan.documents(0, 1, *places)[1] for places in ranks])
    if not np.array_equal(np.concatenate(slices), whole) or len(np.unique(whole)) != given.batch:
        raise RuntimeError("the ranks' slices differ from the batch, or a document occurs twice in it")
    for first in (0, steps // 3, steps // 2, max(0, steps - 1)):
        number = min(given.sample, given.documents)
        index = first * given.batch + np.arange(number, dtype=np.int64)
        epochs = index // given.documents
        found = plan.documents(first, first + -(-number // given.batch))[1][:number]
        numbers = permute(given.seed, epochs, found, given.documents, inverse=True)
        if not np.array_equal(numbers, index % given.documents):
            raise RuntimeError(f"step {first}: the permutation is not one-to-one")
    _, one, grown = timed(
        lambda: plan.documents(steps // 2, steps // 2 + 1, *plan.slice(given.ranks // 2, given.ranks))
    )
    chunk_steps = max(1, _CHUNK_DOCUMENTS // max(1, given.batch // given.ranks))
    _, chunk, _ = timed(lambda: plan.documents(steps // 2, steps // 2 + chunk_steps, *plan.slice(0, given.ranks)))
    return {
        "first_batch_of_a_rank": figure(1000 * one, "ms", "measured", "numbers of one rank's documents of a step"),
        "memory_of_a_rank": figure(max(0.0, grown), "MiB", "measured", "growth of the process; no table is held"),
        "first_batch_of_all_ranks": figure(1000 * all_ranks, "ms", "measured", "all slices, one after the other"),
        "chunk": figure(1000 * chunk, "ms", "measured", f"numbers of a chunk, {chunk_steps} steps of a rank"),
        "checked_places": figure(4 * min(given.sample, given.documents), "places", "measured", "the inverse agrees"),
        "steps_an_epoch": figure(steps, "steps", "computed", "documents / batch"),
    }


def manifest_figures(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Open and read a manifest and shards of that many documents, as a run does."""
    make_shards(folder, given.shards, max(1, given.documents // given.shards))
    shards, index_seconds, index_mib = timed(lambda: ShardSet(folder, "train", look=False))
    mine = rank_plan(Plan(given.seed, shards.num_documents, given.batch), shards, 0, given.ranks, 0, 2**20)
    before = psutil.Process().memory_full_info().uss
    taken = [timed(partial(shards.take, mine.chunk(number)[1]))[1] for number in range(given.chunks)]
    rows = len(mine.chunk(0)[1])
    grown = (psutil.Process().memory_full_info().uss - before) / _MIB
    missed = max(0.0, 1 - MOST_OPEN / given.shards)  # documents in shards that a process cannot keep open
    _, look_seconds, _ = timed(lambda: ShardSet(folder, "train"))
    manifest, whole_seconds, whole_mib = timed(lambda: load_manifest(folder))
    _, check_seconds, _ = timed(lambda: check_shards(folder))
    return {
        "shards": figure(len(manifest.shards), "shards", "measured", f"{shards.num_documents} documents"),
        "manifest_size": figure((folder / "manifest.json").stat().st_size / _MIB, "MiB", "measured", "on disk"),
        "reader_opens": figure(index_seconds, "s", "measured", "every process that reads: names and sizes only"),
        "reader_memory": figure(index_mib, "MiB", "measured", "growth of the process, once opened"),
        "worker_opens": figure(whole_seconds, "s", "measured", "every training process: the whole manifest"),
        "worker_memory": figure(whole_mib, "MiB", "measured", "growth of the process by the whole manifest"),
        "sizes_of_all_shards": figure(look_seconds, "s", "measured", "driver, once: a stat of each shard"),
        "driver_checks": figure(check_seconds, "s", "measured", "driver, once: each footer, cached disk"),
        "chunk_read": figure(float(np.median(taken)), "s", "measured", f"{rows} documents from as many shards, cached"),
        "reader_after_chunks": figure(grown, "MiB", "measured", f"more after {given.chunks} chunks"),
        "shards_open": figure(min(MOST_OPEN, given.shards), "shards", "computed", "at most, in a process that reads"),
        "files_opened_a_step": figure(given.batch * missed, "files", "computed", "a document each, unless it is open"),
        "reading_cores": figure(
            given.batch / rows * float(np.median(taken)) / given.step_seconds,
            "cores",
            "computed",
            "of all hosts together",
        ),
        "files_opened_a_second": figure(
            given.batch * missed / given.step_seconds, "files/s", "computed", "of the shared disk"
        ),
        "units_of_100_tb": figure(1e14 / UNIT_MIB / _MIB, "units", "computed", f"of {UNIT_MIB:g} MiB; before"),
        "larger_units_of_100_tb": figure(1e14 / MOST_UNITS / _MIB, "MiB", "computed", f"{MOST_UNITS} units"),
    }


def checkpoint_figures(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure size, writing and loading of a checkpoint."""
    encoder = models.encoder(given.model, 0.0, given.seed)
    number = sum(parameter.numel() for parameter in encoder.parameters())
    size = number * 12  # a parameter and its two moments
    contents = {str(part): torch.zeros(number) for part in range(3)}
    path = folder / "probe.safetensors"
    checksum, written, _ = timed(lambda: write_tensors(path, contents), elapsed=True)
    _, verified, _ = timed(lambda: has_checksum(path, checksum))
    _, loaded, _ = timed(lambda: [tensor.clone() for tensor in load_file(path).values()], elapsed=True)
    path.unlink()
    total = size * given.ranks
    return {
        "parameters": figure(number, "parameters", "measured", given.model),
        "size": figure(size / 2**30, "GiB", "computed", "parameters x 12"),
        "written": figure(written, "s", "measured", "with its checksum, until it is on this disk"),
        "verified": figure(verified, "s", "measured", "by every rank that loads"),
        "loaded": figure(loaded, "s", "measured", "from the page cache"),
        "gradient_exchange": figure(
            8 * number / (given.network_gb * 1e9), "s", "computed", "ring: 2 x parameters x 4 bytes / link"
        ),
        "read_by_all_ranks": figure(total / 1e9, "GB", "computed", "size x ranks: each loads for itself"),
        "restart_reads": figure(
            2 * total / (given.disk_gb * 1e9), "s", "computed", "verified and loaded: 2 x total / disk"
        ),
        "disk": figure(given.disk_gb, "GB/s", "assumed", "shared disk, all ranks together, nothing cached"),
    }


def ray_figures(given: argparse.Namespace) -> dict[str, Any]:
    """Compute the tasks per second that a run needs, and measure those of one session here."""
    start_ray(num_cpus=2)
    task = ray.remote(lambda: None)
    ray.get([task.remote() for _ in range(20)])
    _, seconds, _ = timed(lambda: ray.get([task.remote() for _ in range(given.tasks)]), elapsed=True)
    mean_tokens, token_bytes = 3000, 2
    return {
        "tasks_wanted": figure(
            given.batch / _CHUNK_DOCUMENTS / given.step_seconds, "tasks/s", "computed", "batch / 1,024"
        ),
        "tasks_here": figure(given.tasks / seconds, "tasks/s", "measured", "empty tasks, one driver, 2 CPUs"),
        "read_at_the_start": figure(given.ranks * 2, "tasks", "computed", "2 a rank at once, whatever the step takes"),
        "chunk_size": figure(
            _CHUNK_DOCUMENTS * mean_tokens * token_bytes / _MIB, "MiB", "computed", "1,024 x 3,000 tokens x 2 bytes"
        ),
        "bytes_read": figure(
            given.batch * mean_tokens * token_bytes / given.step_seconds / 1e9, "GB/s", "computed", "of the shared disk"
        ),
        "step": figure(given.step_seconds, "s", "assumed", "16 documents a rank"),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("scale", __doc__)
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    options.add_argument("--documents", type=int, default=10**9)
    options.add_argument("--ranks", type=int, default=1024)
    options.add_argument("--shards", type=int, default=100_000)
    options.add_argument("--batch", type=int, default=16_384, help="documents per step, over all ranks")
    options.add_argument("--sample", type=int, default=200_000, help="places to check, in each of four regions")
    options.add_argument("--chunks", type=int, default=20, help="chunks to read")
    options.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="rows of the loss")
    options.add_argument("--model", choices=models.SIZES, default="roberta-base")
    options.add_argument("--tasks", type=int, default=2000, help="empty tasks of Ray")
    options.add_argument("--step-seconds", type=float, default=0.036, help="of 16 documents, computed for an H200")
    options.add_argument("--latency-us", type=float, default=25.0, help="assumed microseconds of the network, one way")
    options.add_argument("--groups", type=int, nargs="+", default=[2, 4, 8, 16], help="ranks of measured all-reduces")
    options.add_argument("--ranks-a-host", type=int, default=8, help="assumed")
    options.add_argument("--disk-gb", type=float, default=10.0, help="assumed GB/s of the shared disk")
    options.add_argument("--network-gb", type=float, default=50.0, help="assumed GB/s of a rank's link")
    options.add_argument("--gpu-tflops", type=float, default=100.0, help="assumed")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"benchmark": "scale", "documents": given.documents, "ranks": given.ranks}
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "plan": partial(plan_figures, given),
            "manifest": partial(manifest_figures, given, Path(folder) / "shards"),
            "loss": partial(loss_figures, given),
            "checkpoint": partial(checkpoint_figures, given, Path(folder)),
            "ray": partial(ray_figures, given),
            "control": partial(control_figures, given),
        }
        try:
            for name in given.parts:
                figures[name] = parts[name]()
                record.progress(f"{name}: {figures[name]}")
        finally:
            ray.shutdown()
    record.publish(figures | record.facts("scale", given.commit), given.json)


if __name__ == "__main__":
    main()
