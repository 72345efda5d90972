"""Silences transformers' reports; its callers log the important ones in a single line."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Mutes transformers' log below errors and its progress bars, and restores both afterwards."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
