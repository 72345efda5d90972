"""Cost of checkpoints: a checkpoint every minute against none, in turns, in one run.

    python -m benchmarks.saving --json OUT [--model distilroberta] [--every-seconds 60] [--stretches 3]

A stretch with saving starts with the copy of a checkpoint (parameters, moments) and lasts until the next one is due, so
that it contains all work of the writer: hash, write, fsync, prune. A stretch of the same length without saving follows.
The benchmark uses the trainer's own stepper and saver, one process, no Ray; every step has the same batch.

A machine's speed drifts from one minute to the next by more than a checkpoint costs. So the cost is measured within the
stretch: the copy, plus the time of the steps until the checkpoint is written, minus that of as many later steps. The
same is computed for the stretches without saving, where it should be zero: `noise`. `between` is the plain ratio of
both kinds.

`agree` is the exchange after each step in which processes agree whether to save or stop, here between two processes.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks import gloo, models, packed, record
from trainer.checkpoints.saver import Saver
from trainer.checkpoints.settings import CheckpointConfig
from trainer.checkpoints.state import RunState
from trainer.checkpoints.weights import collect
from trainer.data.batches import RankBatch
from trainer.parallel.world import Request, World
from trainer.step.step import Stepper

_AGREE_TIMES = 300


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps.

    Attributes:
        copy_seconds: time of the initial checkpoint's copy; 0 without a checkpoint.
        written_seconds: time from the start until that checkpoint was on the disk; 0 without a checkpoint.
        step_seconds: time of each step.
    """

    copy_seconds: float
    written_seconds: float
    step_seconds: list[float]

    @property
    def seconds(self) -> float:
        """Duration of the stretch."""
        return self.copy_seconds + sum(self.step_seconds)

    def lost_share(self, until: float) -> float:
        """Share of time lost: the copy and the steps started in the first `until` seconds, minus as many later ones."""
        begins = accumulate(self.step_seconds, initial=self.copy_seconds)
        count = sum(begin < until for begin, _ in zip(begins, self.step_seconds, strict=False))
        early, later = self.step_seconds[:count], self.step_seconds[count:]
        lost = self.copy_seconds + sum(early) - count * statistics.median(later or early)
        return lost / (self.seconds - lost)


class Stretches:
    """Maker of stretches, with and without an initial checkpoint."""

    def __init__(self, stepper: Stepper, batch: RankBatch, folder: Path) -> None:
        self.stepper = stepper
        self.batch = batch
        self.saver = Saver(folder, CheckpointConfig(keep_last=2), "mrr", after=self._written)
        self.steps = 0
        self.num_bytes = 0
        self._written_at = 0.0

    def run(self, seconds: float, saves: bool) -> Stretch:
        """Run a stretch of at least this length, and one step longer than the writing of its checkpoint."""
        begun = time.perf_counter()
        self._written_at = 0.0
        if saves:
            self._save()
        copied = time.perf_counter() - begun if saves else 0.0
        taken: list[float] = []
        while True:
            written = self._written_at or not saves
            step_begun = time.perf_counter()
            self.steps += 1
            self.stepper.step(self.batch, 1 + self.steps % packed.TOTAL_STEPS)
            taken.append(time.perf_counter() - step_begun)
            if written and time.perf_counter() - begun >= seconds:
                return Stretch(copied, self._written_at - begun if saves else 0.0, taken)

    def _written(self, step: int) -> None:  # noqa: ARG002 - the saver passes it
        self._written_at = time.perf_counter()

    def _save(self) -> None:
        memory = self.saver.reuse_memory()
        stepper = self.stepper
        contents = collect(stepper.encoder, stepper.optimizer, stepper.objective, memory=memory)
        state = RunState(
            step=self.steps,
            documents=self.steps,
            world_size=1,
            config_hash="",
            data_hash="",
            scores={},
            files={},
        )
        self.saver.submit(state, contents)
        self.num_bytes = sum(tensor.nbytes for file in contents.values() for tensor in file.values())


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the overhead and its parts."""
    workload = packed.Workload.of(options, options.device, options.precision, dropout=0.1)
    stepper, batch = workload.stepper(workload.encoder()), workload.batch(0, options.documents)
    stretches = Stretches(stepper, batch, folder / "checkpoints")
    stretches.run(0, saves=False)
    stretches.run(0, saves=True)  # creates moments and the memory for copies
    safe: list[Stretch] = []
    plain: list[Stretch] = []
    for number in range(options.stretches):
        for saves in (True, False) if number % 2 == 0 else (False, True):
            stretch = stretches.run(options.every_seconds, saves)
            (safe if saves else plain).append(stretch)
            written = f", written after {stretch.written_seconds:.1f} s" if saves else ""
            record.progress(f"stretch {number}: {statistics.mean(stretch.step_seconds):.4f} s a step{written}")
    stretches.saver.close()
    costs = [stretch.lost_share(stretch.written_seconds) for stretch in safe]
    noise = [stretch.lost_share(pair.written_seconds) for stretch, pair in zip(plain, safe, strict=True)]
    means = [[stretch.seconds / len(stretch.step_seconds) for stretch in kind] for kind in (safe, plain)]
    between = [one / other - 1 for one, other in zip(*means, strict=True)]
    agree = float(gloo.run(2, agree_seconds)[0]) if options.agree else None
    return {
        **_middle("overhead", costs),
        **_middle("noise", noise),
        **_middle("between", between),
        "step_seconds": {
            "with": [round(mean, 5) for mean in means[0]],
            "without": [round(mean, 5) for mean in means[1]],
        },
        "written_seconds": [round(stretch.written_seconds, 3) for stretch in safe],
        "copy_seconds": [round(stretch.copy_seconds, 4) for stretch in safe],
        "steps": stretches.steps,
        "checkpoint_mib": round(stretches.num_bytes / 2**20, 2),
        "agree_seconds": None if agree is None else round(agree, 7),
        "agree_share": None if agree is None else round(agree / statistics.median(means[1]), 6),
    }


def _middle(name: str, shares: list[float]) -> dict[str, Any]:
    """Median, range, and all values."""
    return {
        name: round(statistics.median(shares), 5),
        f"{name}_range": [round(min(shares), 5), round(max(shares), 5)],
        f"{name}_each": [round(share, 5) for share in shares],
    }


def agree_seconds(world: World) -> float:
    """Median seconds of one agreement of the processes."""
    taken = []
    for _ in range(_AGREE_TIMES):
        begun = time.perf_counter()
        world.agree(Request(0))
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    options = record.parser("saving", __doc__)
    record.add_device(options)
    options.add_argument("--model", choices=models.SIZES, default="distilroberta")
    options.add_argument("--documents", type=int, default=4, help="documents per step")
    options.add_argument("--every-seconds", type=float, default=60.0, help="length of a stretch; every other one saves")
    options.add_argument("--stretches", type=int, default=3, help="stretches of each kind")
    options.add_argument("--folder", type=Path, help="folder for checkpoints (a temporary folder)")
    options.add_argument("--no-agree", dest="agree", action="store_false", help="one process only")
    given = options.parse_args(arguments)
    given.spans = given.spans or [32, 512]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(given, Path(folder))
    settings = {key: value for key, value in vars(given).items() if key not in ("json", "commit", "folder")}
    record.publish({"benchmark": "saving", **settings, **found, **record.facts("saving", given.commit)}, given.json)


if __name__ == "__main__":
    main()
