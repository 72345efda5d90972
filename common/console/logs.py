"""One log format with the process's role, and Ray kept quiet unless something is wrong."""

import logging
import os
import sys

from tqdm import tqdm

from common.console.streams import lasting_streams
from common.console.terminal import visible


class _BesideBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines of their own: a bar on the same stream is cleared before and drawn again after."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Visible(logging.Formatter):
    """Names and texts in messages steer no terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def setup_logging(role: str) -> None:
    """Logs of this process go to stderr as `time role level message`. `DECLUTR_LOG=DEBUG` shows more.

    Where the reader of its output has ended, the process continues in silence (common/console/streams.py).
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
