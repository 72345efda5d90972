"""Runs at an address (`s3://...`): what a host fetches of them, and what it sends back.

What lies in the store is the run. The folder on a host is a copy, or on its way there: what never arrived is not taken
for part of the run.
"""

import fcntl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from common.console.logs import get_logger
from common.stores.address import child, is_remote
from common.stores.files import names, pull_file, push_file, read_file, remove_file, size_of
from common.stores.folders import is_whole, pull_folder, push_folder, remove_folder
from common.stores.retry import DEFAULT_RETRIES, AlteredError, RemoteError, RetryPolicy
from pipeline.shards.manifest import data_hash, load_manifest
from trainer.checkpoints import checkpoint, ranking, retention
from trainer.checkpoints.checkpoint import CHECKPOINTS, STATE
from trainer.checkpoints.state import RunState
from trainer.metrics.metrics import METRICS
from trainer.metrics.tensorboard import BOARD
from trainer.parallel.world import World
from trainer.setup.cache import data_folder, run_folder
from trainer.setup.config import CheckpointConfig, TrainConfig

Found = tuple[Path, RunState] | None


def store_of(config: TrainConfig, patience: RetryPolicy = DEFAULT_RETRIES) -> "RunStore | None":
    """Where the run lies, if that is an address."""
    return RunStore(config.run, run_folder(config), patience) if is_remote(config.run) else None


def fetch_run(config: TrainConfig, world: World) -> None:
    """Where the run is at an address, makes the hosts of all workers hold the checkpoint it goes on from, and no other.

    Raises:
        AlteredError: a worker does not find whole what the first one found whole.
        RemoteError: the store refuses, or did not answer in time.
        UnreadableError: the disk of this host fails.
    """
    store = store_of(config)
    if store is None:
        return
    found = None
    if world.rank == 0:
        shards = load_manifest(data_folder(config))
        found = store.fetch(expected={"config_hash": config.hash(), "data_hash": data_hash(shards)})
    step = world.largest(0 if found is None else found[1].step)
    if step and world.rank != 0:
        store.bring(step)


def after_save(config: TrainConfig) -> Callable[[int], None] | None:
    """Sends a checkpoint that lies on this host, in a single try; None: the run lies in a folder."""
    store = store_of(config, RetryPolicy(total_seconds=0.0))  # the saver has a patience of its own
    return None if store is None else partial(store.save, config.checkpoint, config.validation.score)


class RunStore:
    """A run in an object store, laid out as in a folder.

    Args:
        address: of the run.
        folder: of the run on this host.
        patience: with a store that does not answer.
    """

    def __init__(self, address: str, folder: Path, patience: RetryPolicy) -> None:
        self.address, self.folder, self._patience = address, folder, patience
        self._states: dict[int, RunState] = {}  # those that were read

    def fetch(self, files: Sequence[str] = (), expected: Mapping[str, str] | None = None) -> Found:
        """Fetches the numbers, these files and the newest checkpoint that verifies; returns the latter.

        They take the place of what is here.

        Args:
            files: further names in the run's folder.
            expected: as for `checkpoint.find_latest`.

        Raises:
            RemoteError: the store refuses, did not answer in time, or holds something else there.
            UnreadableError: the disk of this host fails.
        """
        if is_whole(self.address, self._patience):  # of its checkpoints none has a list of its own
            raise RemoteError(f"{self.address} holds a folder that was pushed as a whole: name another address")
        for name in (METRICS, *files):
            if not pull_file(child(self.address, name), self.folder / name, self._patience):
                (self.folder / name).unlink(missing_ok=True)
        return self._bring_first(list(reversed(self._steps())), expected)

    def fetch_best(self, score: str) -> None:
        """As `ranking.find_best`: fetches that checkpoint, in place of those here.

        Raises:
            RemoteError: the store refuses, or did not answer in time.
        """
        scores = self._scores(self._steps(), score)
        self._bring_first(ranking.from_best({step: value for step, value in scores.items() if value is not None}))

    def bring(self, step: int) -> None:
        """Makes this host hold that checkpoint as it lies in the store, and no other.

        Raises:
            AlteredError: it does not verify.
            RemoteError: the store refuses, or did not answer in time.
        """
        self._discard_all_but(step)
        pull_folder(
            self._place(step), checkpoint.checkpoint_path(self.folder / CHECKPOINTS, step), self._patience, renew=True
        )

    def save(self, config: CheckpointConfig, score: str, step: int) -> None:
        """Sends a checkpoint that lies here, the numbers up to it first, and takes away what need not be kept.

        Raises:
            RemoteError: the store refuses, or did not answer in time.
        """
        self.send(METRICS, *(f"{BOARD}/{path.name}" for path in sorted((self.folder / BOARD).glob("*"))[-1:]))
        place = self._place(step)
        if is_whole(place, self._patience):  # passed over at the start: this run has come by its step again
            remove_folder(place, self._patience)
        self._states.pop(step, None)
        push_folder(checkpoint.checkpoint_path(self.folder / CHECKPOINTS, step), place, self._patience)
        try:
            self._prune(config, score, step)
        except OSError as error:  # what should be gone is still there: the next one deletes it
            get_logger().warning("old checkpoints of %s cannot be deleted now (%s)", self.address, error)

    def send(self, *files: str) -> None:
        """Sends files of the run's folder; those that are not here are taken away there.

        Raises:
            RemoteError: the store refuses, or did not answer in time.
        """
        for name in files:
            if (self.folder / name).is_file():
                push_file(self.folder / name, child(self.address, name), self._patience)
            else:
                remove_file(child(self.address, name), self._patience)

    def send_folder(self, name: str) -> str:
        """Sends a folder of the run, whole or not at all; returns its address.

        What lies there is compared by size with what it should be: a file that was lost there is sent again.

        Raises:
            RemoteError: the store refuses, or did not answer in time.
        """
        address, local = child(self.address, name), self.folder / name
        push_folder(local, address, self._patience)
        for path in sorted(path for path in local.rglob("*") if path.is_file()):
            place = child(address, path.relative_to(local).as_posix())
            if size_of(place, self._patience) != path.stat().st_size:
                get_logger().warning("%s is missing or truncated: sending it again", place)
                push_file(path, place, self._patience)
        return address

    def _prune(self, config: CheckpointConfig, score: str, newest: int) -> None:
        """As `retention.prune`: later ones stay; those without a list were left by killed writers."""
        steps = [step for step in self._steps() if step <= newest]
        keep = retention.kept(self._scores(steps, score), config)
        for step in steps:
            if step not in keep:
                remove_folder(self._place(step), self._patience)
                self._states.pop(step, None)

    def _steps(self) -> list[int]:
        """Steps that have a checkpoint in the store, whole or not, in order."""
        return checkpoint.steps_among(names(child(self.address, CHECKPOINTS), self._patience))

    def _place(self, step: int) -> str:
        return child(child(self.address, CHECKPOINTS), checkpoint.checkpoint_path(Path(), step).name)

    def _scores(self, steps: Sequence[int], score: str) -> dict[int, float | None]:
        """The score of each of these that is whole; None where it was not validated."""
        rate, found = ranking.rating(self.folder / CHECKPOINTS, score), {}
        for step in steps:
            if step not in self._states:
                place = self._place(step)
                try:
                    if not is_whole(place, self._patience):
                        continue
                    raw = read_file(child(place, STATE), self._patience)
                    self._states[step] = RunState.model_validate_json(raw or b"")
                except (AlteredError, ValidationError) as error:
                    get_logger().warning("passing over a broken checkpoint: %s: %s", place, error)
                    continue
            found[step] = rate(self._states[step])
        return found

    def _bring_first(self, steps: Sequence[int], expected: Mapping[str, str] | None = None) -> Found:
        """Brings the first of these that verifies; none stays here if there is none."""
        for step in steps:
            try:
                self.bring(step)
            except FileNotFoundError:  # it was on its way when its writer was killed
                continue
            except AlteredError as error:
                get_logger().warning("passing over a broken checkpoint: %s", error)
                continue
            if found := checkpoint.find_latest(self.folder / CHECKPOINTS, expected, verify=False):  # it was just now
                return found
        self._discard_all_but(None)
        return None

    def _discard_all_but(self, step: int | None) -> None:
        folder = self.folder / CHECKPOINTS
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:  # several ranks of a host
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in checkpoint.steps_in(folder):
                if other != step:
                    checkpoint.discard(checkpoint.checkpoint_path(folder, other))
