"""The stages of a preparation on Ray Data, and their progress; each skips finished units.

Without removal of duplicates, a single stage reads and writes the units. With it, the first stage writes candidates,
the second finds duplicates over all units, and the third writes the units without them.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import WorkerCrashedError

from declutr.common import session
from declutr.common.console.logs import get_logger, input_bar
from declutr.common.errors import ShardError
from declutr.common.storage import Files, decoded, encoded
from declutr.common.stores.address import is_remote
from declutr.common.stores.copies import PLAN
from declutr.common.watcher import Watcher
from declutr.pipeline.duplicates.pairs import DUPLICATES
from declutr.pipeline.job.output import HEARTBEATS, PROGRESS, Preparation, Stage, output_engine
from declutr.pipeline.job.stored import OutputStore, StoredOutput
from declutr.pipeline.job.units import Unit
from declutr.pipeline.job.worker import BEAT_SECONDS, most_frequent_labels, write_selected, write_unit
from declutr.pipeline.shards.content import noun_of
from declutr.pipeline.shards.manifest import Sidecar
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

# Retries of a unit whose worker died; limited, because an input that crashes a library does so every time.
_ATTEMPTS = 10


def run_stages(job: Preparation, tokenizer: TokenizerInfo | None) -> list[Sidecar]:
    """Completes the units of an output; returns their sidecars in plan order."""
    output, units = job.output, job.units
    if not output.duplicates.enabled:
        return _run("prepare", job, units, tokenizer)
    if (output.folder / DUPLICATES).exists():
        # Once the duplicates are known, only units with missing files are read again.
        settings_hash = job.plan.config_hash
        missing = [unit for unit in units if output.finished_sidecar(unit, "select", settings_hash) is None]
        _run("prepare", job, missing, tokenizer)
    else:
        candidates = _run("prepare", job, units, tokenizer)
        try:
            output.find_duplicates([unit.name for unit in units], most_frequent_labels(candidates, job.config.content))
        except (ShardError, OSError) as error:
            raise _stopped("duplicates", output.name, error) from error
    # Written a second time, not marked: the numbers of documents are the order of training, so shards have no holes.
    return _run("select", job, units, tokenizer)


def _run(stage: Stage, job: Preparation, units: Sequence[Unit], tokenizer: TokenizerInfo | None) -> list[Sidecar]:
    """Processes unfinished units on Ray Data; returns the sidecars of all units in order."""
    config, output, settings_hash = job.config, job.output, job.plan.config_hash
    stored = output if isinstance(output, StoredOutput) else None
    existing = [output.finished_sidecar(unit, stage, settings_hash) for unit in units]
    done = [sidecar for sidecar in existing if sidecar]
    sidecars = {sidecar.unit: sidecar for sidecar in done}
    todo = [unit for unit, sidecar in zip(units, existing, strict=True) if sidecar is None]
    todo.sort(key=lambda unit: (-unit.weight, unit.name))  # a large unit started last would keep one worker busy alone
    if done:
        get_logger().info("%s: %d of %d units are already finished", stage, len(done), len(units))
    if todo:
        write: Callable[[Unit, Path], Sidecar] = partial(write_selected, config=config, tokenizer=tokenizer)
        if stage == "prepare":
            engine = output_engine(job, output.folder, units)
            beats = output.folder / HEARTBEATS
            write = partial(write_unit, config=config, tokenizer=tokenizer, engine=engine, beats=beats)
        session.start_ray(output.session.num_cpus, output.session.address)
        needs = {unit.name: encoded(stored.needed_files(stage, unit.name) if stored else {}) for unit in todo}
        items = [{"unit": unit.model_dump_json(), "needs": needs[unit.name]} for unit in todo]
        # One block a unit, so that a dead task is retried alone. The order of completion does not matter.
        rows = ray.data.from_items(items, override_num_blocks=len(todo))
        arguments: dict[str, Any] = {"folder": str(output.folder), "write": write}
        arguments["other_hosts"] = stored is not None or not session.started_here
        if stored is not None:
            arguments |= {"store": stored.store, "shared": stored.shared_files(stage)}
        results = rows.map(
            work_on, fn_kwargs=arguments, num_cpus=1, ray_remote_args_fn=lambda: {"max_retries": _ATTEMPTS}
        )
        num_bytes = sum(unit.num_bytes for unit in units)
        with Progress(output.folder, stage, num_bytes, done, noun_of(config.content.kind)) as progress:
            try:
                for row in results.iter_rows():
                    if row["problem"]:
                        raise _stopped(stage, output.name, row["problem"])
                    sidecar = Sidecar.model_validate_json(row["sidecar"])
                    if stored is not None:
                        stored.add(stage, sidecar)
                    sidecars[sidecar.unit] = sidecar
                    progress.add(sidecar)
            except WorkerCrashedError as error:
                left = [unit for unit in todo if unit.name not in sidecars]
                names = ", ".join(f"{unit.name} ({unit.parts[0].source} ...)" for unit in left[:3])
                why = (
                    f"workers died {_ATTEMPTS + 1} times on one of the {len(left)} remaining units: {names}. Either "
                    "memory is short (lower session.num_cpus), or an input crashes a library"
                )
                raise _stopped(stage, output.name, why) from error
    return [sidecars[unit.name] for unit in units]


def work_on(
    row: dict[str, Any],
    folder: str,
    write: Callable[[Unit, Path], Sidecar],
    other_hosts: bool,
    store: OutputStore | None = None,
    shared: Files | None = None,
) -> dict[str, Any]:
    """Processes one unit; Ray Data maps it from `{"unit": JSON}` to `{"sidecar": JSON, "problem": message}`.

    If the output is in a store, the unit's files are made in a temporary folder of this host, and sent; the row then
    has the list of the files that the task needs (`needs`).

    A full disk or a damaged file is returned as a problem; raised here, users would see it as a traceback of Ray.
    """
    # Ray gives a task one CPU; the tokenizer's own threads would compete with the other tasks.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit = Unit.model_validate_json(row["unit"])
    try:
        if other_hosts:  # on the command's own host the plan has looked at every file
            _refuse_missing(unit, None if store else Path(folder))
        if store is None:
            sidecar = write(unit, Path(folder))
        else:
            needs = decoded(row["needs"], unit.name)
            with store.staging_dir(shared or {}, needs) as place:
                sidecar = write(unit, place)
                store.send_written(place, needs)
    except (OSError, ShardError) as error:  # others are our bugs, whose traceback is needed
        return {"sidecar": "", "problem": f"unit {unit.name}: {error}"}
    return {"sidecar": sidecar.model_dump_json(), "problem": ""}


def _refuse_missing(unit: Unit, output: Path | None) -> None:
    """Checks that this host sees the output folder, and the local inputs that otherwise would count as failed."""
    if output is not None and not (output / PLAN).is_file():
        raise FileNotFoundError(
            f"{output} is not on host {socket.gethostname()}; name a folder that all see, or an address, in output"
        )
    for part in unit.parts:
        if unit.file_states.get(part.path) and not is_remote(part.path) and not Path(part.path).exists():
            raise FileNotFoundError(
                f"{part.path} is not on host {socket.gethostname()}; put the corpus into a folder that all hosts see, "
                "or into an object store, and name it in corpus.paths"
            )


def _stopped(stage: str, output: str, problem: object) -> ShardError:
    return ShardError(f"{stage}: {problem}. Finished work in {output} is kept; the same command continues")


class Progress(Watcher):
    """Input bytes, documents and kept documents of units (`done`: finished before), every two seconds.

    A bar shows them to users, with the noun `rows`; programs read lines of `progress.jsonl`.
    """

    def __init__(self, folder: Path, stage: Stage, total_bytes: int, done: list[Sidecar], rows: str) -> None:
        super().__init__(BEAT_SECONDS, "declutr-progress")
        self._folder, self._stage, self._rows, self._lock = folder, stage, rows, threading.Lock()
        self._finished = set[str]()  # names of units
        self._numbers = [0, 0, 0]  # of finished units: input bytes, documents, kept documents
        self._bar = input_bar(total_bytes, sum(sidecar.num_bytes for sidecar in done), stage)
        self._started, self._before = time.monotonic(), self._bar.n  # the rate is without the bytes of earlier runs
        shutil.rmtree(folder / HEARTBEATS, ignore_errors=True)  # of a run that was killed
        (folder / HEARTBEATS).mkdir()
        for sidecar in done:
            self._count(sidecar)

    def add(self, sidecar: Sidecar) -> None:
        """Counts a finished unit."""
        with self._lock:
            self._count(sidecar)
        self.look()

    def _count(self, sidecar: Sidecar) -> None:
        self._finished.add(sidecar.unit)
        work = sidecar.num_bytes, sidecar.counts.read, sidecar.counts.kept
        self._numbers = [before + more for before, more in zip(self._numbers, work, strict=True)]

    def look(self) -> None:
        """Shows the current numbers, and appends them to `progress.jsonl`."""
        with self._lock:
            now = self._numbers
            for path in (self._folder / HEARTBEATS).glob("[0-9]*"):  # not a file that is being written: .*.tmp
                if path.name not in self._finished:
                    with contextlib.suppress(OSError, ValueError):  # its unit has just ended
                        now = [before + more for before, more in zip(now, json.loads(path.read_bytes()), strict=True)]
            num_bytes, documents, kept = now
            self._bar.set_postfix_str(f"{documents:,} {self._rows}, {kept / max(1, documents):.0%} kept", refresh=False)
            self._bar.update(num_bytes - self._bar.n)
            seconds = time.monotonic() - self._started
            rate = (num_bytes - self._before) / seconds
            line = {
                "stage": self._stage,
                "seconds": round(seconds, 3),
                "documents": documents,
                "kept": kept,
                "input_bytes": num_bytes,
                "total_input_bytes": self._bar.total,
                "eta_seconds": round((self._bar.total - num_bytes) / rate, 1) if rate > 0 else None,
            }
            with contextlib.suppress(OSError), (self._folder / PROGRESS).open("a") as file:  # it serves only messages
                file.write(f"{json.dumps(line)}\n")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._bar.close()
        shutil.rmtree(self._folder / HEARTBEATS, ignore_errors=True)
