"""Turns a spot notice into a drain of this node: the driver then has the workers save and starts them elsewhere.

The metadata server of a cloud announces the end of a spot host. Its address can be changed by the variables that the
clouds' own libraries read: AWS_EC2_METADATA_SERVICE_ENDPOINT and GCE_METADATA_HOST.
"""

import os
import time
from datetime import datetime
from http.client import HTTPException
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from declutr.common.console.logs import get_logger
from declutr.common.watcher import Watcher
from declutr.trainer.worker.channel import UNREACHABLE, drain_node

_EVERY_SECONDS = 5.0  # as AWS recommends; GCP gives 30 s
_MOST_FAILURES = 3
_TIMEOUT_SECONDS = 2.0
_MOST_BYTES = 65536
_GCP_SECONDS = 30.0  # from the notice to the end of the host, by GCP's documentation
_DIRECT = build_opener(ProxyHandler({}))  # a proxy would be asked about its own host


class _Action(msgspec.Struct, frozen=True):
    """AWS's answer."""

    action: str
    time: datetime


Notice = tuple[str, float] | None
"""A cloud's word for the announced end of this host, such as terminate, and its Unix time; None without."""


def aws_notice() -> Notice:
    """The notice of EC2's instance metadata service, version 2, which needs a session token."""
    root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    # A token for each question: none can expire, and a second request every five seconds is far from AWS's limit.
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    answer = _ask(Request(f"{root}/latest/api/token", headers=lifetime, method="PUT"))
    token = answer.decode("ascii", "replace").strip()
    if not (token.isascii() and token.isprintable()):  # a header cannot carry it
        raise OSError("api/token: the answer is no token")
    place = f"{root}/latest/meta-data/spot/instance-action"
    try:
        answer = _ask(Request(place, headers={"X-aws-ec2-metadata-token": token}))
        action = msgspec.json.decode(answer, type=_Action)
    except HTTPError as error:
        if error.code == 404:  # no end is announced
            return None
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OSError(f"spot/instance-action: {error}") from error
    return action.action, action.time.timestamp()


def gcp_notice() -> Notice:
    """The notice of Compute Engine's metadata server; raises as `aws_notice`."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    place = f"http://{host}/computeMetadata/v1/instance/preempted"
    answer = _ask(Request(place, headers={"Metadata-Flavor": "Google"})).strip().upper()
    if answer not in (b"TRUE", b"FALSE"):
        raise OSError(f"instance/preempted is {answer[:40]!r}, not TRUE or FALSE")
    # the server does not tell the time
    return ("preempted", time.time() + _GCP_SECONDS) if answer == b"TRUE" else None


CLOUDS = {"aws": aws_notice, "gcp": gcp_notice}


def _ask(request: Request) -> bytes:
    """The body of the answer."""
    try:
        with _DIRECT.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            content: bytes = answer.read(_MOST_BYTES)
    except HTTPException as error:  # urllib lets it pass, for example an answer that breaks off
        raise OSError(f"{request.full_url}: {error!r}") from error
    return content


class SpotWatch(Watcher):
    """Asks the metadata server of `cloud` in a thread while its block runs, until it announces the end of this host."""

    def __init__(
        self,
        cloud: Literal["aws", "gcp"],  # a key of CLOUDS
        node: str,  # Ray's id of this host
    ) -> None:
        super().__init__(_EVERY_SECONDS, "declutr-spot", at_once=True)
        self._cloud, self._node = cloud, node
        self._failures = 0

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)  # a server that does not answer must not delay the end of a run

    def look(self) -> bool:
        """Asks once; False after the node was drained."""
        try:
            notice = CLOUDS[self._cloud]()
        except (OSError, ValueError) as error:  # ValueError: an address without a scheme
            self._failures += 1
            if self._failures == _MOST_FAILURES:  # said once, as questions go on
                get_logger().warning(
                    "scaling.spot_notices = %s: the metadata server does not answer (%s); the loss of this host will "
                    "be noticed only when it happens. On another cloud, or in a container without a route to the "
                    "server, set it to null",
                    self._cloud,
                    error,
                )
            return True
        self._failures = 0
        if notice is None:
            return True
        action, end = notice
        message = f"{self._cloud} announces the end of this spot host ({action})"
        try:
            refused = drain_node(self._node, message, end)
        except UNREACHABLE as error:
            refused = str(error)
        if refused is not None:
            get_logger().warning("%s in %.0f s; Ray does not drain it: %s", message, end - time.time(), refused)
            return True
        get_logger().warning("%s in %.0f s: draining node %s", message, end - time.time(), self._node[:8])
        return False
