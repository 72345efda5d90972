"""The Hugging Face hub: the form of its names, and a check, once a process and for a few seconds, that it answers.

The hub's client retries for a minute when nothing answers. So a command checks here first. If the hub is not reached,
the command uses the hub's cache on this machine only and reports immediately what is missing.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from urllib.parse import urlsplit

PATIENCE_SECONDS = 3.0
_closed: ContextVar[str] = ContextVar("_closed", default="")
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def looks_like_a_path(name: str) -> bool:
    """Returns True if a name can only be a path; names on the hub are NAME or OWNER/NAME."""
    return _NAME.fullmatch(name) is None


def hub_problem() -> str | None:
    """The reason why the hub cannot be used; None if it answers, whatever the answer."""
    from huggingface_hub import constants  # imported here because it takes a second

    if reason := _closed.get():
        return reason
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _connection_problem(constants.ENDPOINT)


@contextmanager
def cache_only(reason: str) -> Iterator[None]:
    """Sets the hub's client offline for the block, so that names in a received file are looked up in its cache only."""
    token = _closed.set(reason)
    try:
        with hub_or_cache():
            yield
    finally:
        _closed.reset(token)


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Sets the hub's client offline for the block if the hub is not reached, so that it answers from its cache at once.

    Yields:
        The reason why the hub cannot be used; None if it can.
    """
    from huggingface_hub import constants

    problem, before = hub_problem(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or problem is not None
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = before


@lru_cache
def _connection_problem(address: str) -> str | None:
    """Sends one request a process and address."""
    from huggingface_hub import get_session

    answers: list[str | None] = []
    session = get_session()  # before the timeout starts: on a busy machine this takes as long as an answer

    refused = (OSError, ValueError, client_error())

    def ask() -> None:
        try:
            _ = urlsplit(address).port  # raises ValueError for addresses that crash the client
            session.head(address, timeout=2 * PATIENCE_SECONDS)  # the wait below ends first, with its own message
        except refused as error:
            answers.append(f"{address} is not reached ({error or type(error).__name__})")
        else:
            answers.append(None)

    thread = threading.Thread(target=ask, name="declutr-hub", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)  # a lookup by DNS may take longer than the request's timeout
    return answers[0] if answers else f"{address} does not answer within {PATIENCE_SECONDS:.0f} s"


def client_error() -> type[Exception]:
    """The error of the client that huggingface_hub is built on, whichever HTTP library that is."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__mro__[1]
