"""TensorBoard's event files as bytes: a header, then one record for each line of metrics.

torch's SummaryWriter does not survive a full disk: it loses its buffered events, and every later call fails. So only
the file format is used.
"""

import io
import math
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

TENSORBOARD = "tensorboard"


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


def record(line: dict[str, Any]) -> bytes:
    """Converts a line of metrics with `kind` and `step` to one event; leaves out values that are not finite."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=f"{line['kind']}/{name}", simple_value=float(value))
        for name, value in line.items()
        if name not in ("step", "time", "batch_digest") and isinstance(value, int | float) and math.isfinite(value)
    ]
    return _record(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=values)))


def _record(event: "Event") -> bytes:
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
