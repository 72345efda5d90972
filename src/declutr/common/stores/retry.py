"""Retries while an object store does not answer, and the errors and remedies when retrying does not help."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import shorten
from declutr.common.credentials import redact
from declutr.common.errors import AlteredError, RemoteError
from declutr.common.stores.address import network_errors

# Errors that a retry does not change, as Arrow words them.
_FINAL = (
    "ACCESS_DENIED",
    "NO_SUCH_BUCKET",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "ExpiredToken",
    "(HTTP status 400) during Head",
    "To create buckets,",
)
_AWS = re.compile(r"AWS Error (?P<code>.+?) during (?P<operation>\w+) operation: (?P<cause>.*)", re.DOTALL)
_SHOWN_CHARACTERS = 300
# The cause behind a store's error code, and the remedy; the first that matches.
_REMEDIES = {
    "ExpiredToken": "The credentials have expired: renew them and run the same command again",
    "(HTTP status 400) during Head": (
        "A store gives no reason for this error; often the credentials have expired: renew them and run the same "
        "command again"
    ),
    "TOO_SKEWED": "The clock of this host differs too much from the store's; correct it",
    "StorageFull": "The store is full; free space there",
    "QuotaExceeded": "The quota of this store is used up; raise it or free space there",
    "HTTP status 507": "The store is full; free space there",
    "SLOW_DOWN": "The store limits the request rate; use fewer hosts at a time, or a separate prefix for this run",
    "HTTP status 503": "The store is overloaded or limits the request rate",
    "ACCESS_DENIED": "Check the credentials, their permissions and this host's clock",
    "INVALID_ACCESS_KEY_ID": "Check the credentials",
    "SIGNATURE_DOES_NOT_MATCH": "Check the credentials",
    "OAuth2 access token": (
        "No credentials for Google Cloud were found: set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run "
        "`gcloud auth application-default login`"
    ),
    "NO_SUCH_BUCKET": "Name a bucket that exists",
    "NETWORK_CONNECTION": "The store is not reached: check the network, and the address (?endpoint_override=HOST:PORT "
    "names a store other than AWS)",
}

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RetryPolicy:
    """Retry times for a store that does not answer.

    Attributes:
        total_seconds: time after which retrying stops.
        first_seconds: wait before the second attempt; each further wait is twice as long.
        longest_seconds: longest wait.
    """

    total_seconds: float = 600.0
    first_seconds: float = 0.5
    longest_seconds: float = 30.0


DEFAULT_RETRIES = RetryPolicy()


def with_retries(url: str, retries: RetryPolicy, action: Callable[[], Answer]) -> Answer:
    """Runs an action and retries it while the store does not answer; logs the start and the end of an outage.

    Raises:
        AlteredError: a file that the action needs is missing.
        RemoteError: the store refuses, or did not answer for longer than `retries.total_seconds`.
    """
    began, wait, logged = time.monotonic(), retries.first_seconds, False
    while True:
        try:
            with network_errors():
                answer = action()
        except FileNotFoundError as error:
            raise AlteredError(f"{url}: {error}") from error
        except RemoteError:  # already classified
            raise
        except OSError as error:
            if isinstance(error, PermissionError) or any(word in str(error) for word in _FINAL):
                raise RemoteError(f"{url} refuses: {explained(error)}") from error
            away = time.monotonic() - began
            if away + wait > retries.total_seconds:
                raise RemoteError(
                    f"{url} has not answered for {away:.0f} s, the last error: {explained(error)}"
                ) from error
            if not logged:
                cause = explained(error)
                get_logger().warning("%s does not answer (%s); retrying for %.0f s", url, cause, retries.total_seconds)
                logged = True
            time.sleep(wait)
            wait = min(2 * wait, retries.longest_seconds)
        else:
            if logged:
                get_logger().info("%s answers again, after %.0f s", url, time.monotonic() - began)
            return answer


def explained(error: OSError) -> str:
    """A store's error in short: operation, code and cause, then the remedy if one is known."""
    text = redact(str(error))
    if match := _AWS.search(text):
        cause = match["cause"].rpartition("Details: ")[2].strip(". ")
        text = f"{match['operation']}: {match['code']}" + (f" ({cause})" if cause != "No response body" else "")
    remedy = next((remedy for code, remedy in _REMEDIES.items() if code in str(error)), "")
    return shorten(text, _SHOWN_CHARACTERS) + (f". {remedy}" if remedy else "")
