"""Addresses of files in object stores and on other hosts, their file systems, errors of these, and retries."""

import hashlib
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import shorten
from declutr.common.errors import RemoteError, redact, refusal

OBJECT_STORES = ("s3://", "gs://", "gcs://")
RETRY_SECONDS = 600.0  # time for which a store that does not answer is asked again
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 30.0  # between two attempts; each wait is twice as long
# Errors that a retry does not change, as Arrow words them.
_FINAL = re.compile(
    r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH|ExpiredToken"
    r"|\(HTTP status 400\) during Head|To create buckets,"
)
_GOOGLE_RETRY_SECONDS = 15  # then our own retries go on, with a message
_AWS = re.compile(r"AWS Error (?P<code>.+?) during (?P<operation>\w+) operation: (?P<cause>.*)", re.DOTALL)
_SHOWN_CHARACTERS = 300
Answer = TypeVar("Answer")
# A store's error, and the remedy; the first that matches.
_REMEDIES = {
    "ExpiredToken": "The credentials have expired: renew them and run the same command again",
    r"\(HTTP status 400\) during Head": "A store gives no reason for this error; often the credentials have expired: "
    "renew them and run the same command again",
    "TOO_SKEWED": "The clock of this host differs too much from the store's; correct it",
    "StorageFull|HTTP status 507": "The store is full; free space there",
    "QuotaExceeded": "The quota of this store is used up; raise it or free space there",
    "SLOW_DOWN": "The store limits the request rate; use fewer hosts at a time, or a separate prefix for this run",
    "HTTP status 503": "The store is overloaded or limits the request rate",
    "ACCESS_DENIED": "Check the credentials, their permissions and this host's clock",
    "INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH": "Check the credentials",
    "OAuth2 access token": "No credentials for Google Cloud were found: set GOOGLE_APPLICATION_CREDENTIALS to a key "
    "file, or run `gcloud auth application-default login`",
    "Protocol not known": "Use s3://, gs://, file:// or another protocol of fsspec",
    "NO_SUCH_BUCKET": "Name a bucket that exists",
    "support range requests": "Download the file, and name the copy",
    "NETWORK_CONNECTION": "The store is not reached: check the network, and the address (?endpoint_override=HOST:PORT "
    "names a store other than AWS)",
}


def is_remote(path: str) -> bool:
    """Returns True if a path is an address with a protocol."""
    return "://" in path


def bucket_problem(address: str) -> str | None:
    """The problem of an address that names no bucket, as `s3://$BUCKET` does without the variable; None of others."""
    scheme, _, rest = address.partition("://")
    place = rest.partition("?")[0]
    if address.startswith(OBJECT_STORES):
        place = place.partition("/")[0].rpartition("@")[2]
    example = "folder; write file:///FOLDER" if scheme == "file" else f"bucket; write {scheme}://BUCKET/FOLDER"
    return None if place.strip("/") else f"names no {example}"


def filesystem(address: str) -> tuple[Any, str, str]:
    """File system, path in it, and the options (query) of the address."""
    if problem := refusal(address) or bucket_problem(address):
        raise PermissionError(problem)
    scheme, _, rest = address.partition("://")
    if address.startswith(OBJECT_STORES):  # not `urlsplit`, for which a # in a name would end it
        place, _, query = rest.partition("?")
        netloc, slash, path = place.partition("/")
        return _arrow(scheme, netloc, query), f"{netloc.rpartition('@')[2]}{slash}{path}", query
    from fsspec.core import url_to_fs

    files, path = url_to_fs(address)
    return files, path, ""


def is_object_store(files: Any) -> bool:
    """Returns True for a file system of S3 or Google Storage, whose files are objects: they need no folder."""
    from fsspec.implementations.arrow import ArrowFSWrapper  # imports pyarrow, for which most commands do not wait

    return isinstance(files, ArrowFSWrapper)


def address_of(files: Any, name: str, address: str, query: str) -> str:
    """The address of a file of this file system, found under `address`."""
    scheme, _, rest = address.partition("://")
    if address.startswith(OBJECT_STORES):
        user, at, _ = rest.partition("?")[0].partition("/")[0].rpartition("@")
        return f"{scheme}://{user}{at}{name}{query and '?'}{query}"
    return str(files.unstrip_protocol(name))


def child(address: str, name: str) -> str:
    """The address of `name` in the folder `address`; options of the address stay at the end."""
    place, mark, query = address.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


def short_name(url: str, *parts: bytes) -> str:
    """A folder name on this host for an address and, optionally, its content."""
    digest = hashlib.sha256(b"\0".join((url.encode(), *parts))).hexdigest()
    return f"{posixpath.basename(url.partition('?')[0].rstrip('/'))}-{digest[:16]}"


def files_below(
    files: Any,  # the file system
    folder: str,  # path in it; none are in one that does not exist
    levels: int | None = None,  # levels of folders to look into, 1: the folder alone; None: all
) -> dict[str, dict[str, Any]]:
    """Facts of all files below a folder by name; fsspec's `find` and `glob` leave out folders that cannot be listed."""
    below, waiting = dict[str, dict[str, Any]](), [(folder, 1)]
    while waiting:
        here, level = waiting.pop()
        try:
            inside = files.ls(here, detail=True)
        except FileNotFoundError:  # removed meanwhile
            continue
        for facts in inside:
            name = str(facts["name"])
            if facts["type"] == "file":
                below[name] = facts
            elif facts["type"] == "directory" and level != levels:
                if name.rstrip("/") == here.rstrip("/"):  # pyarrow's name of the folder without a name in this one
                    raise OSError(f"keys with // below {name}/ cannot be read; rename them")
                waiting.append((name, level + 1))
    return below


@lru_cache
def _arrow(scheme: str, netloc: str, query: str) -> Any:
    """Opens one connection a process. Credentials come from the environment, the endpoint from it or the address."""
    # a file below 5 MiB then takes one request to S3, not three; Google's library would retry for 15 minutes in silence
    option, value = ("allow_delayed_open", "true") if scheme == "s3" else ("retry_limit_seconds", _GOOGLE_RETRY_SECONDS)
    if option not in query:
        query += f"{query and '&'}{option}={value}"
    import pyarrow.fs
    from fsspec.implementations.arrow import ArrowFSWrapper

    files, _ = pyarrow.fs.FileSystem.from_uri(f"{scheme}://{netloc}{query and '?'}{query}")
    return ArrowFSWrapper(files)


@contextmanager
def network_errors() -> Iterator[None]:
    """Turns errors of the HTTP libraries into OSError; the libraries have already retried where that helps."""
    # Imported here because it takes half a second.
    import pyarrow as pa
    from aiohttp import ClientError
    from huggingface_hub.errors import HFValidationError

    from declutr.common.hub import client_error

    try:
        yield
    except OSError:
        raise
    except (ClientError, client_error(), HFValidationError, pa.ArrowException, ValueError, ImportError) as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def explained(error: OSError) -> str:
    """A store's error in short: operation, code and cause, then the remedy if one is known."""
    text = redact(str(error))
    if match := _AWS.search(text):
        cause = match["cause"].rpartition("Details: ")[2].strip(". ")
        text = f"{match['operation']}: {match['code']}" + (f" ({cause})" if cause != "No response body" else "")
    remedy = next((remedy for code, remedy in _REMEDIES.items() if re.search(code, str(error))), "")
    return shorten(text, _SHOWN_CHARACTERS) + (f". {remedy}" if remedy else "")


def retried(url: str, seconds: float, action: Callable[[], Answer]) -> Answer:
    """The result of an action on `url`, retried for so long while the store does not answer, with an outage logged."""
    began, wait, logged = time.monotonic(), _FIRST_WAIT_SECONDS, False
    while True:
        try:
            with network_errors():
                answer = action()
            break
        except (FileNotFoundError, RemoteError):  # an answer; already classified
            raise
        except OSError as error:
            cause, away = explained(error), time.monotonic() - began
            if isinstance(error, PermissionError) or _FINAL.search(str(error)):
                raise RemoteError(f"{url} refuses: {cause}") from error
            if away + wait > seconds:
                since = f" has not answered for {away:.0f} s, the last error" if seconds else ""
                raise RemoteError(f"{url}{since}: {cause}") from error
            if not logged:
                get_logger().warning("%s does not answer (%s); retrying for %.0f s", url, cause, seconds)
            logged = True
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
    if logged:
        get_logger().info("%s answers again, after %.0f s", url, time.monotonic() - began)
    return answer
