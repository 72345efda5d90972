"""transformers without its own reports: what matters of them is said by those who use it, in a line that names it."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Mutes transformers' log below errors, and its progress bars; both are afterwards as they were."""
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
