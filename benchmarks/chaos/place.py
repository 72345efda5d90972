"""Place of the faults: a temporary folder, private mounts, clusters of several nodes, a tiny workload."""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.chaos.run import ATTACHED, ROOT, Census, Run, family
from declutr.common import seeding
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS

_CLONE_NEWNS = 0x00020000  # of linux/sched.h
_RUN_MIB = 256  # enough for the metrics of a run
_CHECKPOINTS_MIB = 16
# A dead node is noticed after two seconds instead of half a minute; users would set this on every node.
_QUICK = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
}


def environment(top: Path) -> dict[str, str]:
    """Environment of all started processes: this checkout's code, Ray's files below `top`, no foreign cluster."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "DECLUTR_LOG")}
    return kept | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ATTACHED}",
        "PYTHONWARNINGS": "ignore",
        "DECLUTR_CHAOS": str(top / "attach"),
        "RAY_TMPDIR": str(top / "ray"),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_WAIT_POLICY": "passive",  # there are more threads than cores, so none may spin
        **_QUICK,
    }


def leave_mounts_to_ourselves() -> None:
    """As root, make mounts visible only to this process and its children; they end with these processes."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "cannot create a private mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


@contextmanager
def temporary() -> Iterator[Path]:
    """Make a folder with a short name, because Ray's sockets are below it; remove it afterwards."""
    top = Path(tempfile.mkdtemp(prefix="chaos-"))
    (top / "attach").mkdir()
    (top / "ray").mkdir()
    try:
        yield top
    finally:
        for path in mounts_below(top):  # lazily, because processes that end may hold files
            subprocess.run(["umount", "--lazy", str(path)], check=False)
        shutil.rmtree(top, ignore_errors=True)


def mounts_below(top: Path) -> list[Path]:
    """Mounts below a folder, innermost first."""
    with Path("/proc/mounts").open(encoding="utf-8") as stream:
        mount_points = [Path(line.split()[1]) for line in stream]
    # An outer one is busy while an inner one is mounted.
    return sorted((path for path in mount_points if path.is_relative_to(top)), key=lambda path: -len(path.parts))


@contextmanager
def small_disks(run: Run) -> Iterator[None]:
    """Mount one small disk for the run's folder and another for its checkpoints."""
    disks = [(run.folder, _RUN_MIB), (run.folder / CHECKPOINTS, _CHECKPOINTS_MIB)]
    for path, mib in disks:
        path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        run.end()  # a process of it would keep its disk in use
        for path, _ in reversed(disks):
            subprocess.run(["umount", "--lazy", str(path)], check=True)


class Nodes:
    """Ray cluster of several nodes here, at `address`: a head without room for workers, and nodes for one each."""

    def __init__(self, census: Census, number: int) -> None:
        from ray.cluster_utils import Cluster

        self.census = census
        self._cluster = Cluster(
            initialize_head=True,
            # Ray's least store is 75 MiB
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20},
        )
        self.address = str(self._cluster.address)
        self.nodes: list[Any] = []
        try:
            self.add(number)
        except BaseException:  # nobody else knows of the cluster yet
            self.close()
            raise

    def add(self, number: int = 1) -> None:
        """Start nodes in parallel; return when all have joined."""
        self.nodes += [
            self._cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20, wait=False) for _ in range(number)
        ]
        self._cluster.wait_for_nodes()

    def with_spare(self, pid: int) -> Any:
        """Add a node; return the one on which a process runs."""
        [node] = [node for node in self.nodes if any(process.pid == pid for process in _processes(node))]
        self.add()
        return node

    def remove(self, node: Any) -> None:
        """Kill all processes of a node at once, as if its machine failed."""
        below = _processes(node)  # before its end, which gives them another parent
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)
        self.census.end(below)

    def close(self) -> None:
        """Stop the cluster."""
        with suppress(Exception):
            self._cluster.shutdown()


def _processes(node: Any) -> set[psutil.Process]:
    return family(entry.process.pid for entries in node.all_processes.values() for entry in entries)


_GEOMETRY = {"num_anchors": 2, "max_tokens": 64}
_BATCH = 8
_HELD_OUT = 0.05
_FROM_CONFIG = {
    "model_type": "roberta",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 72,
}


def write_corpus(path: Path, steps: int, seed: int) -> None:
    """Write JSON lines of random words, few a document so that its spans are alike: an epoch, and held-out ones."""
    rng = np.random.default_rng(seeding.torch_seed(seed, "chaos corpus"))
    letters = np.array(list("abcdefghijklmnop"))
    words = ["".join(rng.choice(letters, rng.integers(2, 7))) for _ in range(300)]
    with path.open("w", encoding="utf-8") as stream:
        # 2: the draws may hold out more than the share
        for number in range(round(steps * _BATCH / (1 - 2 * _HELD_OUT))):
            topic = rng.choice(words, 40)
            stream.write(json.dumps({"text": f"{' '.join(rng.choice(topic, rng.integers(120, 181)))} {number}"}) + "\n")


def prepare_values(corpus: Path, output: Path) -> dict[str, Any]:
    """The `prepare` section for this corpus."""
    return {
        "output": str(output),
        "corpus": {"kind": "files", "paths": [str(corpus)]},
        "tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1},
        "geometry": _GEOMETRY,
        "validation_fraction": _HELD_OUT,
        "unit_mib": 1,
        "session": {"num_cpus": 1},
    }


def train_values(data: Path, run: Path, steps: int, seed: int) -> dict[str, Any]:
    """The `train` section, within one epoch."""
    return {
        "run": str(run),
        "data": str(data),
        "encoder": {"from_config": _FROM_CONFIG, "dropout": 0.1},  # its masks depend on the step
        "objective": {"queue_size": 24},  # a state that a resume may lose
        "spans": {**_GEOMETRY, "num_positives": 2, "min_tokens": 16},
        "optim": {"lr": 0.0002},
        "batch_documents": _BATCH,
        "precision": "fp32",  # in bfloat16 a world of another size differs by more than the order of sums
        "steps": steps,
        "seed": seed,
        "validation": {"every_steps": steps // 2, "max_documents": 40},
        "checkpoint": {"every_steps": 20, "keep_last": 4},
        "scaling": {
            "num_workers": 2,
            "device": "cpu",
            "data_cpus": 1,
            "watchdog_timeout_seconds": 15.0,
            "elastic_resize_interval_seconds": 5,
        },
    }
