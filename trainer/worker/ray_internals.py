"""The only use of names of Ray that are not public: its key-value store and the draining of nodes.

A later version of Ray may lack one of them, so pyproject.toml bounds it; `tests/trainer/test_imports.py` names it with
the installed version.
"""

from typing import Any


def head() -> Any:
    """Connection of this process to Ray's head.

    Raises:
        TimeoutError: no session is connected, as between two sessions.
    """
    from ray.experimental import internal_kv

    client = internal_kv.internal_kv_get_gcs_client()
    if client is None:
        raise TimeoutError("no Ray session is connected")
    return client


def draining_nodes() -> dict[str, int]:
    """Nodes that are about to be removed: id and Unix time in milliseconds, 0 if unknown.

    Ray's public call, `ray.train.get_preemption_info`, is an exchange between all workers; this reads the same source.
    """
    from ray._private.state import state

    nodes: dict[str, int] = state.get_draining_nodes()
    return nodes


def drain_node(node: str, reason: str, end: float) -> str | None:
    """Tells Ray that a node ends at a Unix time, so that nothing new is started there.

    Returns:
        None, or why Ray refuses.
    """
    from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

    accepted, why = head().drain_node(node, DRAIN_NODE_REASON_PREEMPTION, reason, int(end * 1000))
    return None if accepted else str(why)
