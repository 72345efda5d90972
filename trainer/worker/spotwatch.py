"""Turns a spot notice into a drain of this node: the driver then has the workers save and starts them elsewhere."""

import time
from typing import Literal

from declutr.common.console.logs import get_logger
from declutr.common.watcher import Watcher
from declutr.trainer.worker.channel import UNREACHABLE
from declutr.trainer.worker.metadata import CLOUDS
from declutr.trainer.worker.ray_internals import drain_node

_EVERY_SECONDS = 5.0  # as AWS recommends; GCP gives 30 s
_MOST_FAILURES = 3


class SpotWatch(Watcher):
    """Asks the metadata server of `cloud` in a thread while its block runs, until it announces the end of this host.

    Args:
        cloud: a key of CLOUDS.
        node: Ray's id of this host.
        every_seconds: pause between two questions.
    """

    def __init__(self, cloud: Literal["aws", "gcp"], node: str, every_seconds: float = _EVERY_SECONDS) -> None:
        super().__init__(every_seconds, "declutr-spot", at_once=True)
        self._cloud, self._node, self._metadata = cloud, node, CLOUDS[cloud]()
        self._failures = 0

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)  # a server that does not answer must not delay the end of a run

    def look(self) -> bool:
        """Asks once; False after the node was drained."""
        try:
            notice = self._metadata.notice()
        except OSError as error:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
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
        message = f"{self._cloud} announces the end of this spot host ({notice.action})"
        try:
            refused = drain_node(self._node, message, notice.at)
        except UNREACHABLE as error:
            refused = str(error)
        if refused is not None:
            get_logger().warning("%s in %.0f s; Ray does not drain it: %s", message, notice.at - time.time(), refused)
            return True
        get_logger().warning("%s in %.0f s: draining node %s", message, notice.at - time.time(), self._node[:8])
        return False
