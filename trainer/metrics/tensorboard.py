"""TensorBoard's event files as bytes: a header, then one record for each line of metrics.

torch's SummaryWriter does not survive a full disk: it loses its buffered events, and every later call fails. So only
the file format is used.
"""

import io
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from declutr.trainer.metrics.appendlog import AppendLog
from declutr.trainer.metrics.loggers import tags

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

TENSORBOARD = "tensorboard"


class TensorBoardLogger:
    """Appends lines of metrics to a new event file of a run, which hides later steps of earlier files.

    Args:
        folder: folder of the run.
        after_step: last step of the checkpoint.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path, after_step: int) -> None:
        path = event_file_path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header(after_step + 1))
        self._events = AppendLog(path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Takes a line of metrics."""
        self._events.add(record(line))

    def flush(self, to_disk: bool = False) -> None:
        """Writes the lines that were added.

        Raises:
            OSError: the storage failed; nothing is lost.
        """
        self._events.flush(to_disk)

    def close(self) -> None:
        """Does nothing: the file is open during a flush alone."""


def event_file_path(folder: Path) -> Path:
    """Path of a new event file of a run; names sort by time."""
    return folder / TENSORBOARD / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"


def header(purge_step: int) -> bytes:
    """Header of an event file, which hides `purge_step` and later steps of earlier files."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # only the first worker writes events

    start = SessionLog(status=SessionLog.START)
    return _record(Event(wall_time=time.time(), file_version="brain.Event:2")) + _record(
        Event(wall_time=time.time(), step=purge_step, session_log=start)
    )


def record(line: Mapping[str, Any]) -> bytes:
    """Converts a line of metrics with `kind` and `step` to one event; leaves out values that are not finite."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=tag, simple_value=float(value))
        for tag, value in tags(line).items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]
    return _record(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=values)))


def _record(event: "Event") -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
