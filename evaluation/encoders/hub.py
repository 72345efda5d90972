"""Does the Hugging Face hub answer? Asked once, for a few seconds: its own client tries again for up to a minute."""

import threading
from functools import cache

from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

_PATIENCE_SECONDS = 3.5
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]  # of the client that huggingface_hub is built on


@cache
def hub_answers() -> bool:
    """Whether the hub can be asked; False at once where `HF_HUB_OFFLINE` forbids it. Waits 3.5 seconds at most."""
    if is_offline_mode():
        return False
    answers: list[int] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=_PATIENCE_SECONDS).status_code)
        except (OSError, ValueError, RuntimeError, _HTTP_ERROR):
            return

    asking = threading.Thread(target=ask, daemon=True)  # looking up a name may take longer than any timeout
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return bool(answers)


def stay_offline_unless_it_answers() -> None:
    """Has every library of this process take what is kept here where the hub does not answer, without trying again."""
    if not hub_answers():
        constants.HF_HUB_OFFLINE = True


def hub_address() -> str:
    """The hub's address, for messages."""
    return str(constants.ENDPOINT)
