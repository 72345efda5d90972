"""What it costs to be safe: steps with a checkpoint every minute against steps without, in turns, in one run.

    python -m benchmarks.saving --json OUT [--model distilroberta] [--every-seconds 60] [--stretches 3]

A stretch with saving begins with the copy of a checkpoint (parameters, moments) and lasts until the next one is due, so
that everything the writer does falls into it: hash, write, fsync, prune. Then as long a stretch without. The trainer's
own stepper and saver, one process, no Ray; every step has the same batch. `agree` is the exchange after each step in
which processes tell each other whether to save or stop, measured between two of them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks import documents, models, packed, record
from common.storage import write_text
from trainer import checkpoint
from trainer.config import CheckpointConfig
from trainer.gather import Wish, World
from trainer.masking import MaskingConfig
from trainer.objectives import DeclutrConfig
from trainer.saver import Saver
from trainer.spans import SpanConfig
from trainer.state import RunState
from trainer.step import RankBatch, Stepper
from trainer.tensorfile import num_bytes

_AGREE_TIMES = 300


class Stretches:
    """Steps until a time is over, with and without a checkpoint at the beginning."""

    def __init__(self, stepper: Stepper, batch: RankBatch, saver: Saver) -> None:
        self.stepper = stepper
        self.batch = batch
        self.saver = saver
        self.steps = 0
        self.num_bytes = 0
        self.copy_seconds: list[float] = []

    def run(self, seconds: float, saves: bool) -> float:
        """Mean seconds of a step of a stretch that lasts at least so long, its checkpoint included."""
        begun = time.perf_counter()
        if saves:
            self._save()
        steps = 0
        while steps == 0 or time.perf_counter() - begun < seconds:
            self.steps += 1
            steps += 1
            self.stepper.step(self.batch, 1 + self.steps % packed.TOTAL_STEPS)
        taken = time.perf_counter() - begun
        self.saver.wait()  # a stretch that was too short for the writer must not leave it to the next
        return taken / steps

    def _save(self) -> None:
        begun = time.perf_counter()
        memory = self.saver.lend()
        stepper = self.stepper
        contents = checkpoint.collect(stepper.encoder, stepper.optimizer, stepper.objective, memory=memory)
        state = RunState(
            step=self.steps,
            documents=self.steps,
            world_size=1,
            config_hash="",
            data_hash="",
            scores={},
            files={},
        )
        self.saver.give(state, contents)
        self.copy_seconds.append(time.perf_counter() - begun)
        self.num_bytes = sum(map(num_bytes, contents.values()))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Overhead, and what it is made of."""
    spans = SpanConfig(min_tokens=options.spans[0], max_tokens=options.spans[1])
    feed = models.feed(options.model, spans, MaskingConfig(), options.seed)
    table = documents.documents(0, options.documents, spans, feed.vocabulary.size, options.seed)
    device = torch.device(options.device)
    batch = packed.rank_batch(feed, table, device)
    encoder = models.encoder(options.model, 0.1, options.seed).to(device)
    autocast = record.autocast_type(options.precision, options.device)
    stepper = packed.stepper(encoder, feed, DeclutrConfig(), None, autocast)
    saver = Saver(folder / "checkpoints", CheckpointConfig(keep_last=2), "mrr")
    stretches = Stretches(stepper, batch, saver)
    stretches.run(0, saves=False)
    stretches.run(0, saves=True)  # moments and the memory of copies exist from here on
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(options.stretches):
        order = ("with", "without") if number % 2 == 0 else ("without", "with")
        for name in order:
            seconds[name].append(stretches.run(options.every_seconds, saves=name == "with"))
            record.progress(f"stretch {number} {name}: {seconds[name][-1]:.4f} s a step")
    begun = time.perf_counter()
    stretches.run(0, saves=True)
    alone = time.perf_counter() - begun
    saver.close()
    ratios = [safe / plain for safe, plain in zip(seconds["with"], seconds["without"], strict=True)]
    step_seconds = statistics.median(seconds["without"])
    agree = agree_seconds() if options.agree else None
    return {
        "overhead": round(statistics.median(ratios) - 1, 5),
        "overhead_range": [round(min(ratios) - 1, 5), round(max(ratios) - 1, 5)],
        "step_seconds": {name: [round(value, 5) for value in values] for name, values in seconds.items()},
        "steps": stretches.steps,
        "checkpoint_mib": round(stretches.num_bytes / 2**20, 2),
        "copy_seconds": [round(value, 4) for value in stretches.copy_seconds],
        "step_and_write_seconds": round(alone, 3),
        "agree_seconds": None if agree is None else round(agree, 7),
        "agree_share": None if agree is None else round(agree / step_seconds, 6),
    }


def agree_seconds() -> float:
    """Median seconds of one agreement of two processes over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_agree, (folder,), nprocs=2, start_method="forkserver")
        return float(json.loads((Path(folder) / "0.json").read_text()))


def _agree(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        world, taken = World(rank, 2), []
        for _ in range(_AGREE_TIMES):
            begun = time.perf_counter()
            world.agree(Wish(0))
            taken.append(time.perf_counter() - begun)
        write_text(Path(folder) / f"{rank}.json", json.dumps(statistics.median(taken)))
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints and writes."""
    options = record.parser("saving", __doc__)
    record.add_device(options)
    options.add_argument("--model", choices=models.SIZES, default="distilroberta")
    options.add_argument("--documents", type=int, default=4, help="of a step")
    options.add_argument("--every-seconds", type=float, default=60.0, help="of a stretch; a checkpoint in every other")
    options.add_argument("--stretches", type=int, default=3, help="of each kind")
    options.add_argument("--folder", type=Path, help="where checkpoints go (a temporary folder)")
    options.add_argument("--no-agree", dest="agree", action="store_false", help="one process only")
    given = options.parse_args(sys.argv[1:] if arguments is None else arguments)
    given.spans = given.spans or [32, 512]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(given, Path(folder))
    settings = {key: value for key, value in vars(given).items() if key not in ("json", "commit", "folder")}
    record.publish({"benchmark": "saving", **settings, **found, **record.facts("saving", given.commit)}, given.json)


if __name__ == "__main__":
    main()
