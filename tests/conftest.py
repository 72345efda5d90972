"""Settings that every test needs before Ray is imported."""

import logging
import os

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a local session would otherwise write a token to the home folder
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture
def log():
    """Messages of the project's logger in this process."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("declutr")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("DEBUG")
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)
