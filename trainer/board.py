"""The board between the driver and its workers: Ray's own key-value store, so no process, port or file of its own.

Workers write what they do (trainer/pulse.py) every half second, the driver writes a notice to stop. A write takes about
a millisecond of a thread beside the training.
"""

import json
from dataclasses import dataclass
from typing import Any

from ray.experimental import internal_kv

_NAMESPACE = "declutr"


@dataclass(frozen=True)
class Board:
    """The notes of one run.

    Attributes:
        name: of this run's driver; another driver has another.
    """

    name: str

    def post(self, pulse: dict[str, Any]) -> None:
        """A worker's pulse, in place of its last."""
        self._put(f"pulse/{pulse['rank']}", pulse)

    def pulses(self) -> list[dict[str, Any]]:
        """The newest pulse of every rank that ever wrote one."""
        keys = internal_kv._internal_kv_list(f"{self.name}/pulse/", namespace=_NAMESPACE)
        found = (internal_kv._internal_kv_get(key, namespace=_NAMESPACE) for key in keys)
        return [json.loads(raw) for raw in found if raw]

    def ask_to_stop(self, reason: str) -> None:
        """Tells the workers to save and end."""
        self._put("stop", {"reason": reason})

    def asked_to_stop(self) -> str | None:
        """Why the workers shall end; None: they shall not."""
        raw = internal_kv._internal_kv_get(f"{self.name}/stop", namespace=_NAMESPACE)
        return None if raw is None else str(json.loads(raw)["reason"])

    def clear(self) -> None:
        """Takes everything down."""
        internal_kv._internal_kv_del(f"{self.name}/", del_by_prefix=True, namespace=_NAMESPACE)

    def _put(self, key: str, value: dict[str, Any]) -> None:
        internal_kv._internal_kv_put(f"{self.name}/{key}", json.dumps(value), namespace=_NAMESPACE)
