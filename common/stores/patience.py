"""Patience with an object store that is away, and the errors of one: what waiting changes, and what else to do."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from common.console.logs import get_logger
from common.stores.address import network_errors

# What waiting does not change, in Arrow's words.
_FINAL = (
    "ACCESS_DENIED",
    "NO_SUCH_BUCKET",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "ExpiredToken",
    "(HTTP status 400) during Head",
    "To create buckets,",
)
# The cause behind a store's error code, and the remedy; the first that matches.
_REMEDIES = {
    "ExpiredToken": "The credentials have expired: renew them and give the same command again",
    "(HTTP status 400) during Head": (
        "A store gives no reason to this question; often the credentials have expired: renew them and give the same "
        "command again"
    ),
    "TOO_SKEWED": "The clock of this host differs too much from the store's: set it",
    "StorageFull": "The store is full: make room there",
    "QuotaExceeded": "The quota of this store is used up: raise it or make room there",
    "HTTP status 507": "The store is full: make room there",
    "SLOW_DOWN": "The store throttles: fewer hosts at a time, or a prefix of its own for this run",
    "HTTP status 503": "The store throttles or is overloaded",
    "ACCESS_DENIED": "Credentials, their rights and this host's clock decide this",
    "INVALID_ACCESS_KEY_ID": "Credentials decide this",
    "SIGNATURE_DOES_NOT_MATCH": "Credentials decide this",
    "NO_SUCH_BUCKET": "Name a bucket that exists",
}

Answer = TypeVar("Answer")


class RemoteError(OSError):
    """A folder that cannot be sent or fetched: what, where, since when, what to do."""


class AlteredError(RemoteError):
    """What lies there is not what was sent: waiting does not help."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for a place that is away.

    Attributes:
        total_seconds: after which it is given up.
        first_seconds: before the second try; each further wait is twice as long as the one before.
        longest_seconds: of a wait.
    """

    total_seconds: float = 600.0
    first_seconds: float = 0.5
    longest_seconds: float = 30.0


PATIENT = Patience()


def persist(url: str, patience: Patience, action: Callable[[], Answer]) -> Answer:
    """Acts, again and again while the place is away; one line in the log an outage, one when it is over.

    Args:
        url: of the place, for messages.
        patience: with it.
        action: is done.

    Raises:
        AlteredError: what the action needs is not there.
        RemoteError: refused, or away for longer than `patience.total_seconds`.
    """
    began, wait, told = time.monotonic(), patience.first_seconds, False
    while True:
        try:
            with network_errors():
                answer = action()
        except FileNotFoundError as error:
            raise AlteredError(f"{url}: {error}") from error
        except RemoteError:  # judged already
            raise
        except OSError as error:
            if isinstance(error, PermissionError) or any(word in str(error) for word in _FINAL):
                raise RemoteError(f"{url} refuses: {error}{_remedy(error)}") from error
            away = time.monotonic() - began
            if away + wait > patience.total_seconds:
                raise RemoteError(
                    f"{url} has not answered for {away:.0f} s, the last error: {error}{_remedy(error)}"
                ) from error
            if not told:
                told_error = f"{error}{_remedy(error)}"
                get_logger().warning(
                    "%s does not answer (%s); trying again for %.0f s", url, told_error, patience.total_seconds
                )
                told = True
            time.sleep(wait)
            wait = min(2 * wait, patience.longest_seconds)
        else:
            if told:
                get_logger().info("%s answers again, after %.0f s", url, time.monotonic() - began)
            return answer


def _remedy(error: OSError) -> str:
    """The sentence that follows a store's own message; empty where nothing is known."""
    known = (remedy for code, remedy in _REMEDIES.items() if code in str(error))
    return next((f". {remedy}" for remedy in known), "")
