"""The Hugging Face hub: which names it can have, and whether it answers, asked once and for a few seconds.

Its client tries again for a minute where nothing answers. A command asks here first: where the hub is not reached,
only what its cache on this machine holds is used, and what is missing is said at once.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from urllib.parse import urlsplit

PATIENCE_SECONDS = 3.0
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def looks_like_a_path(name: str) -> bool:
    """Whether a name can only be a path: the hub's are NAME or OWNER/NAME."""
    return _NAME.fullmatch(name) is None


def hub_problem() -> str | None:
    """The reason why the hub cannot be asked; None where it answers, whatever it answers."""
    from huggingface_hub import constants  # a second that only those pay who need it

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _asked(constants.ENDPOINT)


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Within it the hub's client is offline where the hub is not reached: it answers from its cache, at once.

    Yields:
        Why the hub cannot be asked; None where it can.
    """
    from huggingface_hub import constants

    problem, before = hub_problem(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or problem is not None
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = before


def stay_offline_unless_it_answers() -> None:
    """Sets the hub's client of this process offline where the hub does not answer: only its cache here is read."""
    from huggingface_hub import constants

    if hub_problem():
        constants.HF_HUB_OFFLINE = True


@lru_cache
def _asked(address: str) -> str | None:
    """One request a process and address, in a thread: looking up a host may hang longer than any time-out."""
    from huggingface_hub import get_session

    found: list[str | None] = []
    session = get_session()  # built here: on a busy machine that takes as long as an answer

    refused = (OSError, ValueError, _client_error())

    def ask() -> None:
        try:
            _ = urlsplit(address).port  # refuses addresses that the client would end on
            session.head(address, timeout=PATIENCE_SECONDS)
        except refused as error:
            found.append(f"{address} is not reached ({error or type(error).__name__})")
        else:
            found.append(None)

    thread = threading.Thread(target=ask, name="declutr-hub", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return found[0] if found else f"{address} does not answer within {PATIENCE_SECONDS:.0f} s"


def _client_error() -> type[Exception]:
    """The error of the client that huggingface_hub is built on, whichever HTTP library that is."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error: type[Exception] = HfHubHTTPError.__mro__[1]
    return http_error
