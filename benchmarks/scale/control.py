"""Cost of the control plane: agreements of the workers and heartbeats at Ray's head, for `benchmarks.scale`.

A step of 1,024 ranks is not run. Measured are all-reduces of up to 16 processes, and the heartbeats of all ranks, which
this process writes to a real head.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from benchmarks import gloo
from benchmarks.record import figure
from declutr.common.session import start_ray
from declutr.trainer.driver.watchdog import Watchdog
from declutr.trainer.parallel import doubling
from declutr.trainer.parallel.communicator import Communicator
from declutr.trainer.worker.channel import ControlChannel, period
from declutr.trainer.worker.heartbeat import Heartbeat
from declutr.trainer.worker.mailbox import Mailbox

_REPEATS = 300
_RING_EXCHANGES = 4  # in a step, before both changes: counts, twice the memory, requests
_EXCHANGES = 2
_DAY = 86_400.0


def exchange_seconds(comm: Communicator, ranks: int) -> dict[str, float]:
    """Least elapsed seconds of an all-reduce of a step's counts, by both ways; other programs use this machine."""
    counts = torch.ones(2 + 2 * ranks, dtype=torch.int64)
    ways: dict[str, Callable[[], object]] = {
        "ring": lambda: dist.all_reduce(counts.clone()),
        "doubling": lambda: doubling.all_reduce(counts, comm.rank, comm.size, torch.add),
    }
    found = dict.fromkeys(ways, math.inf)
    for name, work in ways.items():
        for _ in range(_REPEATS):
            started = time.perf_counter()
            work()
            found[name] = min(found[name], time.perf_counter() - started)
    return found


def rounds(name: str, size: int) -> int:
    """Messages that wait for each other in an all-reduce of this many ranks."""
    return 2 * (size - 1) if name == "ring" else math.ceil(math.log2(size))


def exchange_figures(given: argparse.Namespace) -> dict[str, Any]:
    """Measure all-reduces of small groups, and compute those of all ranks from the time of a round.

    Ranks share the cores of this machine. So a round takes as many times longer as there are ranks to a core; on
    separate hosts it takes the time of one rank and the latency of the network.
    """
    cores = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {"latency": figure(given.latency_us, "us", "assumed", "of the network, one way")}
    a_round: dict[str, list[float]] = {"ring": [], "doubling": []}
    for size in given.groups:
        found = gloo.run(size, exchange_seconds, given.ranks)
        for name, times in a_round.items():
            seconds = statistics.median(one[name] for one in found)
            times.append(seconds * min(1.0, cores / size) / rounds(name, size))
            how = f"least of {_REPEATS}, {rounds(name, size)} rounds; {1e6 * times[-1]:.0f} us a round and rank"
            figures[f"{name}_{size}_ranks"] = figure(1e6 * seconds, "us", "measured", how)
    for name, number in (("ring", _RING_EXCHANGES), ("doubling", _EXCHANGES)):
        each = statistics.median(a_round[name]) + 1e-6 * given.latency_us
        seconds = number * rounds(name, given.ranks) * each
        figures[f"{name}_round"] = figure(1e6 * each, "us", "computed", "median of a round and rank, and the latency")
        how = f"{number} all-reduces of {rounds(name, given.ranks)} rounds, none hidden behind the device's work"
        figures[f"{name}_a_step"] = figure(1e3 * seconds, "ms", "computed", how)
        figures[f"{name}_share"] = figure(100 * seconds / given.step_seconds, "%", "computed", "of the step")
    return figures


def heartbeat_figures(given: argparse.Namespace) -> dict[str, Any]:
    """Write the heartbeats of all ranks to a real head, each by itself and one worker a host for all, and read them.

    Args:
        given: options of `benchmarks.scale`.
    """
    start_ray(num_cpus=2)
    with tempfile.TemporaryDirectory() as folder:
        return _written(given, Path(folder))


def _written(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The figures, with a session of Ray."""
    ranks, a_host = given.ranks, given.ranks_a_host
    beats = [Heartbeat(rank, ranks, "group", f"node {rank // a_host}", step=7, steps=7) for rank in range(ranks)]
    boxes = [Mailbox(f"benchmark-{rank // a_host}", rank, _DAY, folder) for rank in range(ranks)]
    alone, together = ControlChannel("alone"), ControlChannel("together")
    processes = psutil.Process().children(recursive=True)  # of this session, not of another one on this machine
    head = next(process for process in processes if process.name().startswith("gcs_server"))

    def cost(work: Callable[[], object]) -> tuple[float, float]:
        """Elapsed seconds, and processor seconds of the head."""
        before, begun = head.cpu_times(), time.perf_counter()
        work()
        elapsed, after = time.perf_counter() - begun, head.cpu_times()
        return elapsed, after.user + after.system - before.user - before.system

    def each() -> None:
        for beat in beats:
            alone.post(beat.rank, [beat.snapshot()])
            alone.stop_reason()

    def files() -> None:
        for beat, box in zip(beats, boxes, strict=True):
            box.write(beat.snapshot())
            box.stop_reason()
            box.leads()

    def hosts() -> None:
        for leader in range(0, ranks, a_host):
            together.post(leader, boxes[leader].heartbeats())
            together.stop_reason()

    each_seconds, each_head = cost(each)
    files_seconds, _ = cost(files)
    hosts_seconds, hosts_head = cost(hosts)
    read_seconds, _ = cost(together.heartbeats)
    found, dog = together.heartbeats(), Watchdog(60.0, 2.0)
    if len(found) != ranks or len(alone.heartbeats()) != ranks:
        raise RuntimeError("a heartbeat is missing")
    for beat in found:
        beat |= {"steps": 100, "own_seconds": 0.03 + 1e-6 * beat["rank"]}
    look_seconds, _ = cost(lambda: (dog.look(found, 0.0), dog.slow()))
    seconds, num_hosts = period(ranks), -(-ranks // a_host)
    return {
        "ranks_a_host": figure(a_host, "ranks", "assumed", "GPUs of a host"),
        "period": figure(seconds, "s", "computed", "between two heartbeats; 0.5 s up to 256 ranks"),
        "each_rank_calls": figure(4.0 * ranks, "calls/s", "computed", "before: a write and a read, twice a second"),
        "each_rank_head": figure(
            200 * each_head, "%", "computed", f"of a core of the head, {each_seconds:.2f} s for all"
        ),
        "hosts_calls": figure(2 * num_hosts / seconds, "calls/s", "computed", "a write and a read a host"),
        "hosts_head": figure(100 * hosts_head / seconds, "%", "computed", f"of a core; {hosts_seconds:.2f} s for all"),
        "worker_files": figure(1e3 * files_seconds / ranks, "ms", "measured", "a worker's files, each period"),
        "driver_reads": figure(1e3 * read_seconds, "ms", "measured", f"{ranks} heartbeats, each period"),
        "driver_judges": figure(1e3 * look_seconds, "ms", "measured", f"{ranks} heartbeats, twice a second"),
    }


def control_figures(given: argparse.Namespace) -> dict[str, Any]:
    """The control plane of a step: agreements and heartbeats."""
    return {"agreements": exchange_figures(given), "heartbeats": heartbeat_figures(given)}
