"""One log format for all processes, which names the process's role."""

import logging
import os
import sys

from tqdm import tqdm

from declutr.common.console.streams import lasting_streams
from declutr.common.console.terminal import visible


class _BesideBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes each record on a separate line: clears a progress bar on the same stream and redraws it afterwards."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Visible(logging.Formatter):
    """Escapes control characters in messages, so that file names and texts cannot control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def setup_logging(role: str) -> None:
    """Sends the logs of this process to stderr as `time role level message`. `DECLUTR_LOG=DEBUG` shows more.

    If the reader of its output ends, the process continues and drops further output (common/console/streams.py).
    """
    lasting_streams()
    level = os.environ.get("DECLUTR_LOG", "INFO").upper()
    handler = _BesideBars(sys.stderr)
    handler.setFormatter(_Visible(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("declutr")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def get_logger() -> logging.Logger:
    """The project's logger."""
    return logging.getLogger("declutr")
