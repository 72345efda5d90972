"""The control channel between the driver and its workers, in Ray's key-value store: no extra process, port or file.

Each worker writes its heartbeat (trainer/worker/heartbeat.py) twice a second, and less often in a group of over 256
workers; the driver writes a stop notice. A write takes about a millisecond of a thread alongside the training.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

from ray.exceptions import GetTimeoutError, RaySystemError, RpcError

from declutr.common.watcher import Watcher

EVERY_SECONDS = 0.5  # shortest time between two heartbeats
_MAX_PERIOD_SECONDS = 2.0  # longest time between them: a worker that is silent for ten seconds is in doubt
_MAX_FAST_RANKS = 256  # largest group with the shortest time
_NAMESPACE = b"declutr"
# Without a limit a call waits for a lost head, and after a minute Ray kills the whole process.
_CALL_SECONDS = 5.0
UNREACHABLE = (RpcError, RaySystemError, GetTimeoutError, TimeoutError)
"""Errors of a call when Ray's head does not answer."""


def period(size: int) -> float:
    """Seconds between two heartbeats in a group of `size` workers."""
    return min(_MAX_PERIOD_SECONDS, EVERY_SECONDS * max(1.0, size / _MAX_FAST_RANKS))


@dataclass(frozen=True)
class ControlChannel:
    """Heartbeats and stop notice of one start of the group. Every call may raise one of UNREACHABLE."""

    name: str  # name of the start; each start has a different one

    def post(self, heartbeat: dict[str, Any]) -> None:
        """Replaces the heartbeat of a worker."""
        self._put(f"heartbeat/{heartbeat['rank']}", heartbeat)

    def heartbeats(self) -> list[dict[str, Any]]:
        """The newest heartbeat of every rank that has written one."""
        keys = head().internal_kv_keys(self._key("heartbeat/"), _NAMESPACE, timeout=_CALL_SECONDS)
        values = head().internal_kv_multi_get(list(keys), _NAMESPACE, timeout=_CALL_SECONDS) if keys else {}
        return [json.loads(raw) for raw in values.values()]

    def request_stop(self, reason: str) -> None:
        """Asks the workers to save and stop."""
        self._put("stop", {"reason": reason})

    def stop_reason(self) -> str | None:
        """Reason for the workers to save and stop, or None."""
        raw = head().internal_kv_get(self._key("stop"), _NAMESPACE, timeout=_CALL_SECONDS)
        return None if raw is None else str(json.loads(raw)["reason"])

    def clear(self) -> None:
        """Deletes all entries."""
        by_prefix = True
        head().internal_kv_del(self._key(""), by_prefix, _NAMESPACE, timeout=_CALL_SECONDS)

    def _put(self, key: str, value: Any) -> None:
        raw, overwrite = json.dumps(value).encode(), True
        head().internal_kv_put(self._key(key), raw, overwrite, _NAMESPACE, timeout=_CALL_SECONDS)

    def _key(self, key: str) -> bytes:
        return f"{self.name}/{key}".encode()


class ChannelReader(Watcher):
    """Reads the control channel for the driver in a thread, so that a lost head does not block the driver."""

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__(EVERY_SECONDS, "declutr-reader", at_once=True)  # the size of the group is not known yet
        self.heartbeats: list[dict[str, Any]] = []  # the newest
        self.answered = time.monotonic()  # time of the head's last answer
        self.draining: str | None = None  # message about a node with workers that is about to be removed
        self.stop_reason: str | None = None  # posted as soon as the head answers; None while workers are to run
        self._channel = channel
        self._posted = False

    def look(self) -> None:
        """Posts the stop notice once, reads heartbeats and draining nodes."""
        with contextlib.suppress(*UNREACHABLE):  # the driver sees from `answered` that the head is silent
            if self.stop_reason is not None and not self._posted:
                self._channel.request_stop(self.stop_reason)
                self._posted = True
            self.heartbeats = self._channel.heartbeats()
            self._seconds = period(max((heartbeat["size"] for heartbeat in self.heartbeats), default=1))
            # a worker at its end needs its node no longer
            self.draining = draining(
                {heartbeat["node"] for heartbeat in self.heartbeats if heartbeat["phase"] != "ended"}
            )
            self.answered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=2 * _CALL_SECONDS)
        with contextlib.suppress(*UNREACHABLE):  # a lost head takes the entries with it
            self.heartbeats = self._channel.heartbeats()
            self._channel.clear()


# The only use of names of Ray that are not public. A later version of Ray may lack one of them, so pyproject.toml
# bounds Ray's version; tests/trainer/test_imports.py reports the missing name and the installed version.


def head() -> Any:
    """Connection of this process to Ray's head."""
    from ray.experimental import internal_kv

    client = internal_kv.internal_kv_get_gcs_client()
    if client is None:
        raise TimeoutError("no Ray session is connected")
    return client


def draining(nodes: set[str]) -> str | None:
    """A message if one of these nodes is about to be removed, with the remaining time.

    Ray's public call, `ray.train.get_preemption_info`, is an exchange between all workers; this reads the same source.
    """
    from ray._private.state import state

    # Unix time in milliseconds by node, 0 if unknown
    deadlines: dict[str, int] = {node: at for node, at in state.get_draining_nodes().items() if node in nodes}
    if not deadlines:
        return None
    # a node whose time is unknown counts as the last
    node, deadline_ms = min(deadlines.items(), key=lambda item: item[1] or float("inf"))
    left = f" in {deadline_ms / 1000 - time.time():.0f} s" if deadline_ms else ""
    return f"node {node[:8]} is about to be removed{left}"


def drain_node(node: str, reason: str, end: float) -> str | None:
    """Tells Ray that a node ends at a Unix time, so that nothing new starts there; None, or why Ray refuses."""
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    accepted, why = head().drain_node(node, DRAIN_NODE_REASON_PREEMPTION, reason, int(end * 1000))
    return None if accepted else str(why)
