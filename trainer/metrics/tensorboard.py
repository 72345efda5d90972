"""TensorBoard's event files as bytes: a header, then one record for each line of metrics.

torch's SummaryWriter keeps a thread and an open file that do not survive a full disk: what it held then is lost, and
every later call fails. Only the format is needed here.
"""

import io
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

TENSORBOARD = "tensorboard"


def event_file_path(folder: Path) -> Path:
    """Where a new event file of a run goes; names sort by time."""
    return folder / TENSORBOARD / f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"


def header(purge_step: int) -> bytes:
    """The head of an event file; what earlier files say of `purge_step` and later steps is not shown any more."""
    start = SessionLog(status=SessionLog.START)
    return _record(Event(wall_time=time.time(), file_version="brain.Event:2")) + _record(
        Event(wall_time=time.time(), step=purge_step, session_log=start)
    )


def record(line: dict[str, Any]) -> bytes:
    """A line of metrics, `kind` and `step` among its keys, as one event; what is no finite number is left out."""
    values = [
        Summary.Value(tag=f"{line['kind']}/{name}", simple_value=float(value))
        for name, value in line.items()
        if name not in ("kind", "step", "time", "batch_digest") and value is not None and math.isfinite(value)
    ]
    return _record(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=values)))


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
