"""Runs in an object store (`s3://...`): fetches their files to a host and sends them back.

The files in the store are the run. The folder on a host is a copy; files that were never sent are not part of the run.
"""

import fcntl
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from declutr.common.console.logs import get_logger
from declutr.common.errors import AlteredError, RemoteError
from declutr.common.storage import LISTING
from declutr.common.stores.address import RETRY_SECONDS, is_remote
from declutr.common.stores.folder import Folder
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, STATE
from declutr.trainer.checkpoints.state import CheckpointConfig, RunState
from declutr.trainer.metrics.loggers import TENSORBOARD
from declutr.trainer.metrics.metrics import METRICS

Newest = tuple[Path, RunState] | None


def store_of(address: str, folder: Path, retry_seconds: float = RETRY_SECONDS) -> "RunStore | None":
    """The store of the run at `address`, which is `run` of the configuration; None for a run in a folder."""
    return RunStore(Folder(address, retry_seconds), folder) if is_remote(address) else None


class RunStore:
    """A run in an object store, with the same layout as in a folder.

    Every method raises RemoteError if the store refuses, or did not answer in time.

    Attributes:
        remote: the run in the store.
        folder: its copy on this host.
    """

    def __init__(self, remote: Folder, folder: Path) -> None:
        self.remote, self.folder = remote, folder
        self._states: dict[int, RunState] = {}  # states read so far

    def fetch(self, files: Sequence[str] = (), expected: Mapping[str, str] | None = None) -> Newest:
        """Fetches the metrics, the given files and the newest checkpoint that verifies; returns that checkpoint.

        They replace the local files and checkpoints. `expected` is as for `checkpoint.find_latest`.
        """
        if self.remote.is_whole():  # then its checkpoints have no file lists
            raise RemoteError(f"{self.remote.url} holds a folder that was copied as a whole: name another address")
        for name in (METRICS, *files):
            if not self.remote.pull(name, self.folder / name):
                (self.folder / name).unlink(missing_ok=True)
        return self._fetch_first(list(reversed(self._steps())), expected)

    def fetch_best(self, score: str) -> None:
        """Fetches the checkpoint that `checkpoint.find_best` would choose, in place of the local ones."""
        scores = self._scores(self._steps(), score)
        self._fetch_first(checkpoint.from_best({step: value for step, value in scores.items() if value is not None}))

    def fetch_step(self, step: int) -> None:
        """Fetches a checkpoint from the store and deletes other local checkpoints."""
        self._discard_all_but(step)
        self._there(step).get(self._here(step), renew=True)

    def save(self, config: CheckpointConfig, score: str, step: int) -> None:
        """Sends the metrics and then a local checkpoint, and deletes checkpoints in the store that are not kept.

        Earlier ones that are kept and were never sent, because the store did not answer then, are sent first.
        """
        # of TensorBoard the newest file: earlier starts have sent theirs
        self.send(
            METRICS, *(f"{TENSORBOARD}/{path.name}" for path in sorted((self.folder / TENSORBOARD).glob("*"))[-1:])
        )
        self._states.pop(step, None)
        sent = self._scores([other for other in self._steps() if other < step], score)
        here = {other: state.scores.get(score) for other, state in checkpoint.states_in(self.folder / CHECKPOINTS)}
        keep = checkpoint.kept({other: value for other, value in (here | sent).items() if other <= step}, config)
        for other in dict.fromkeys([*keep, step]):  # the newest also if its state cannot be read here now
            if other not in sent:
                if self._there(other).read(LISTING) is not None:  # broken: its list is damaged, or a start skipped it
                    self._there(other).clear()
                self._there(other).send(self._here(other))
        try:
            for other in self._steps():
                if other < step and other not in keep:  # or has no file list: a killed writer's
                    self._there(other).clear()
                    self._states.pop(other, None)
        except OSError as error:  # the next call deletes them
            get_logger().warning("old checkpoints of %s cannot be deleted now (%s)", self.remote.url, error)

    def send(self, *files: str) -> None:
        """Sends files of the run's folder; files missing here are deleted in the store."""
        for name in files:
            if (self.folder / name).is_file():
                self.remote.put(name, self.folder / name)
            else:
                self.remote.delete(name)

    def send_folder(self, name: str) -> str:
        """Sends a folder of the run, whole or not at all; returns its address."""
        remote = self.remote / name
        remote.send(self.folder / name)
        return remote.url

    def _steps(self) -> list[int]:
        """Steps with a checkpoint in the store, whole or not, in order."""
        return checkpoint.steps_among((self.remote / CHECKPOINTS).names())

    def _there(self, step: int) -> Folder:
        return self.remote / f"{CHECKPOINTS}/{self._here(step).name}"

    def _here(self, step: int) -> Path:
        return checkpoint.checkpoint_path(self.folder / CHECKPOINTS, step)

    def _scores(self, steps: Sequence[int], score: str) -> dict[int, float | None]:
        """Scores of the whole checkpoints among these; None if one was not validated."""
        scores: dict[int, float | None] = {}
        for step in steps:
            if step not in self._states:
                there = self._there(step)
                try:
                    if not there.is_whole():
                        continue
                    self._states[step] = RunState.model_validate_json(there.read(STATE) or b"")
                except (AlteredError, ValidationError) as error:
                    get_logger().warning("skipping a broken checkpoint: %s: %s", there.url, error)
                    continue
            scores[step] = self._states[step].scores.get(score)
        return scores

    def _fetch_first(self, steps: Sequence[int], expected: Mapping[str, str] | None = None) -> Newest:
        """Fetches the first of these that verifies; deletes all local checkpoints if none does."""
        for step in steps:
            try:
                self.fetch_step(step)
            except FileNotFoundError:  # its writer was killed while sending it
                continue
            except AlteredError as error:
                get_logger().warning("skipping a broken checkpoint: %s", error)
                continue
            if newest := checkpoint.find_latest(self.folder / CHECKPOINTS, expected, verify=False):  # just verified
                return newest
        self._discard_all_but(None)
        return None

    def _discard_all_but(self, step: int | None) -> None:
        folder = self.folder / CHECKPOINTS
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:  # held by one rank of the host at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in checkpoint.steps_in(folder):
                if other != step:
                    checkpoint.discard(self._here(other))
