"""The metadata server of a cloud, which announces the end of a spot host.

The addresses can be changed by the variables that the clouds' own libraries read: AWS_EC2_METADATA_SERVICE_ENDPOINT and
GCE_METADATA_HOST.
"""

import os
import time
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPException
from typing import Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

_TIMEOUT_SECONDS = 2.0
_TOKEN_SECONDS = 21600  # the longest that AWS allows
_MOST_BYTES = 65536
_GCP_SECONDS = 30.0  # from the notice to the end of the host, by GCP's documentation
_DIRECT = build_opener(ProxyHandler({}))  # a proxy would be asked about its own host


@dataclass(frozen=True)
class SpotNotice:
    """The announced end of this host.

    Attributes:
        action: the cloud's word for it, such as terminate.
        at: Unix time in seconds.
    """

    action: str
    at: float


class Metadata(Protocol):
    """A cloud's metadata server."""

    def notice(self) -> SpotNotice | None:
        """The announced end of this host, or None.

        Raises:
            OSError: the server does not answer, or answers something else.
        """


class _Action(msgspec.Struct, frozen=True):
    """AWS's answer."""

    action: str
    time: datetime


class AwsMetadata:
    """EC2's instance metadata service, version 2, which needs a session token."""

    def __init__(self) -> None:
        place = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254")
        self._root, self._token = place.rstrip("/"), ""

    def notice(self) -> SpotNotice | None:
        """As `Metadata.notice`."""
        try:
            answer = self._get()
        except HTTPError as error:
            if error.code != 401:
                raise
            self._token = ""  # it has expired
            answer = self._get()
        if answer is None:
            return None
        try:
            found = msgspec.json.decode(answer, type=_Action)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OSError(f"spot/instance-action: {error}") from error
        return SpotNotice(found.action, found.time.timestamp())

    def _get(self) -> bytes | None:
        """The answer about this host's end; None while there is none."""
        if not self._token:
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
            self._token = _ask(Request(f"{self._root}/latest/api/token", headers=lifetime, method="PUT")).decode()
        place = f"{self._root}/latest/meta-data/spot/instance-action"
        try:
            return _ask(Request(place, headers={"X-aws-ec2-metadata-token": self._token}))
        except HTTPError as error:
            if error.code == 404:
                return None
            raise


class GcpMetadata:
    """Compute Engine's metadata server."""

    def __init__(self) -> None:
        self._host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")

    def notice(self) -> SpotNotice | None:
        """As `Metadata.notice`."""
        place = f"http://{self._host}/computeMetadata/v1/instance/preempted"
        answer = _ask(Request(place, headers={"Metadata-Flavor": "Google"})).strip().upper()
        if answer not in (b"TRUE", b"FALSE"):
            raise OSError(f"instance/preempted is {answer[:40]!r}, not TRUE or FALSE")
        return SpotNotice("preempted", time.time() + _GCP_SECONDS) if answer == b"TRUE" else None


CLOUDS: dict[str, type[Metadata]] = {"aws": AwsMetadata, "gcp": GcpMetadata}


def _ask(request: Request) -> bytes:
    """The body of the answer.

    Raises:
        OSError: no answer, no HTTP, or a status other than 200 (HTTPError).
    """
    try:
        with _DIRECT.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(_MOST_BYTES)
    except HTTPException as error:
        raise OSError(f"{request.full_url}: {error!r}") from error
    return content
