"""Reports checkpoints to Ray Train, so that Ray's dashboard and a trial of Tune see them."""

import queue
import threading
from collections.abc import Mapping
from typing import Any

import ray.train
from ray.exceptions import RayError
from ray.train import Checkpoint, CheckpointUploadMode

from declutr.common.console.logs import get_logger


class Reporter:
    """Reports to Ray Train in a thread, so that no step waits for Ray or for another worker's report.

    Every worker reports equally often, because Ray waits for a report of each of them. Ray is told the checkpoint's
    folder; it copies and deletes nothing.

    Args:
        folder: folder of the run's checkpoints as Ray Train knows it, which is its `storage_path` and `name`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._reports: queue.SimpleQueue[tuple[dict[str, Any], Checkpoint | None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="declutr-reporter", daemon=True)
        self._thread.start()

    def report(self, metrics: Mapping[str, Any], name: str | None = None) -> None:
        """Reports later, in order; all workers call it.

        Args:
            metrics: numbers of the checkpoint's step; Ray shows those of the first worker.
            name: of the checkpoint's folder; None on other workers than the first.
        """
        checkpoint = None if name is None else Checkpoint(f"{self._folder}/{name}")
        self._reports.put((dict(metrics), checkpoint))

    def close(self) -> None:
        """Waits until everything is reported; only for the end of the training, because the other workers must come."""
        self._reports.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (report := self._reports.get()) is not None:
                metrics, checkpoint = report
                ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        except RayError as error:  # a process of Ray Train died; training needs none of these reports
            get_logger().warning("checkpoints are no longer reported to Ray Train: %s", str(error).partition("\n")[0])
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self._error = error
