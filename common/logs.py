"""One log format with the process's role, and Ray kept quiet unless something is wrong."""

import logging
import os
import sys


def setup_logging(role: str) -> None:
    """Logs of this process go to stderr as `time role level message`. `DECLUTR_LOG=DEBUG` shows more."""
    level = os.environ.get("DECLUTR_LOG", "INFO").upper()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("declutr")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def get_logger() -> logging.Logger:
    """The project's logger."""
    return logging.getLogger("declutr")
