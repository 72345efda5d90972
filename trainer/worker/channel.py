"""The channel between the driver and its workers: Ray's own key-value store, so no process, port or file of its own.

Workers write what they do (trainer/worker/heartbeat.py) every half second, the driver writes a notice to stop. A write
takes about a millisecond of a thread beside the training.
"""

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RaySystemError, RpcError
from ray.experimental import internal_kv

EVERY_SECONDS = 0.5
_NAMESPACE = b"declutr"
# Without a limit a call waits for a head that is gone, and Ray ends the whole process over it after a minute.
_CALL_SECONDS = 5.0
UNREACHABLE = (RpcError, RaySystemError, GetTimeoutError, TimeoutError)
"""What a call raises when Ray's head does not answer."""


@dataclass(frozen=True)
class ControlChannel:
    """The notes of one run. Every call may raise one of UNREACHABLE.

    Attributes:
        name: of one start of the group; another has another.
    """

    name: str

    def post(self, heartbeat: dict[str, Any]) -> None:
        """A worker's heartbeat, in place of its last."""
        self._put(f"heartbeat/{heartbeat['rank']}", heartbeat)

    def heartbeats(self) -> list[dict[str, Any]]:
        """The newest heartbeat of every rank that ever wrote one."""
        keys = _head().internal_kv_keys(self._key("heartbeat/"), _NAMESPACE, timeout=_CALL_SECONDS)
        found = _head().internal_kv_multi_get(list(keys), _NAMESPACE, timeout=_CALL_SECONDS) if keys else {}
        return [json.loads(raw) for raw in found.values()]

    def request_stop(self, reason: str) -> None:
        """Tells the workers to save and end."""
        self._put("stop", {"reason": reason})

    def stop_reason(self) -> str | None:
        """Why the workers shall end; None: they shall not."""
        raw = _head().internal_kv_get(self._key("stop"), _NAMESPACE, timeout=_CALL_SECONDS)
        return None if raw is None else str(json.loads(raw)["reason"])

    def clear(self) -> None:
        """Takes everything down."""
        _head().internal_kv_del(self._key(""), True, _NAMESPACE, timeout=_CALL_SECONDS)

    def _put(self, key: str, value: dict[str, Any]) -> None:
        _head().internal_kv_put(self._key(key), json.dumps(value).encode(), True, _NAMESPACE, timeout=_CALL_SECONDS)

    def _key(self, key: str) -> bytes:
        return f"{self.name}/{key}".encode()


def _head() -> Any:
    """This process's connection to Ray's head."""
    client = internal_kv.internal_kv_get_gcs_client()
    if client is None:  # between two sessions
        raise TimeoutError("there is no Ray session")
    return client


class ChannelReader(threading.Thread):
    """Reads the channel for the driver, in a thread: a head that is gone must not stop who watches it.

    Attributes:
        heartbeats: the newest.
        answered: monotonic time at which the head last answered.
        draining: a sentence on a node with workers of ours that is about to be taken away; None: there is none.
        stop_reason: why the workers shall end, posted as soon as the head answers.
    """

    def __init__(self, channel: ControlChannel) -> None:
        super().__init__(daemon=True, name="declutr-reader")
        self.heartbeats: list[dict[str, Any]] = []
        self.answered = time.monotonic()
        self.draining: str | None = None
        self.stop_reason: str | None = None
        self._channel = channel
        self._ended = threading.Event()

    def run(self) -> None:
        """Reads until it is ended."""
        posted = False
        while not self._ended.is_set():
            try:
                if self.stop_reason is not None and not posted:
                    self._channel.request_stop(self.stop_reason)
                    posted = True
                self.heartbeats = self._channel.heartbeats()
                self.draining = draining(
                    {heartbeat["node"] for heartbeat in self.heartbeats if heartbeat["phase"] != "ended"}
                )
                self.answered = time.monotonic()
            except UNREACHABLE:
                pass  # `answered` says it
            self._ended.wait(EVERY_SECONDS)

    def end(self) -> None:
        """Ends it after a last look, and takes the channel down."""
        self._ended.set()
        self.join(timeout=2 * _CALL_SECONDS)
        with contextlib.suppress(*UNREACHABLE):  # it goes with the head
            self.heartbeats = self._channel.heartbeats()
            self._channel.clear()


def draining(nodes: set[str]) -> str | None:
    """A sentence if one of these nodes is about to be taken away, with the time that is left.

    Ray's public call, `ray.train.get_preemption_info`, is an exchange between all workers; this asks the same source.
    """
    found = {node: at for node, at in ray._private.state.state.get_draining_nodes().items() if node in nodes}
    if not found:
        return None
    node, deadline_ms = min(found.items(), key=lambda item: item[1] or float("inf"))
    left = f" in {deadline_ms / 1000 - time.time():.0f} s" if deadline_ms else ""
    return f"node {node[:8]} is about to be taken away{left}"
