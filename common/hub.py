"""The Hugging Face hub: which names it can have, and whether it answers, asked once and for a few seconds.

Its client tries again for a minute where nothing answers. A command asks here first: where the hub is not reached,
only what its cache on this machine holds is used, and what is missing is said at once.
"""

import re
import threading
from functools import lru_cache

PATIENCE_SECONDS = 3.0
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def looks_like_a_path(name: str) -> bool:
    """Whether a name can only be a path: the hub's are NAME or OWNER/NAME."""
    return _NAME.fullmatch(name) is None


def hub_problem() -> str | None:
    """Why the hub cannot be asked; None where it answers, whatever it answers."""
    from huggingface_hub import constants  # a second that only those pay who need it

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return _asked(constants.ENDPOINT)


@lru_cache
def _asked(address: str) -> str | None:
    """One request a process and address, in a thread: looking up a host may hang longer than any time-out."""
    found: list[str | None] = []

    def ask() -> None:
        from huggingface_hub.utils import get_session

        try:
            get_session().head(address, timeout=PATIENCE_SECONDS)
        except (OSError, ValueError, *_client_errors()) as error:
            found.append(f"{address} is not reached ({error or type(error).__name__})")
        else:
            found.append(None)

    thread = threading.Thread(target=ask, name="declutr-hub", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    return found[0] if found else f"{address} does not answer within {PATIENCE_SECONDS:.0f} s"


def _client_errors() -> tuple[type[Exception], ...]:
    """What the client of huggingface_hub raises, whichever HTTP library that is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    http_error: type[Exception] = HfHubHTTPError.__mro__[1]
    return (http_error,)
