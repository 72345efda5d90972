"""The only use of names of Ray that are not public: its key-value store and the draining of nodes.

A later version of Ray may lack one of them. `unsupported_ray` names it before a run starts.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import ray

SUPPORTED = ">=2.60,<2.64"
"""Versions of Ray that pyproject.toml allows."""
NAMES: dict[str, Sequence[str]] = {
    "ray.experimental.internal_kv": ["internal_kv_get_gcs_client"],
    "ray._raylet": [
        "InnerGcsClient.internal_kv_put",
        "InnerGcsClient.internal_kv_get",
        "InnerGcsClient.internal_kv_multi_get",
        "InnerGcsClient.internal_kv_keys",
        "InnerGcsClient.internal_kv_del",
        "InnerGcsClient.drain_node",
    ],
    "ray._private.state": ["state.get_draining_nodes"],
    "ray.core.generated.autoscaler_pb2": ["DRAIN_NODE_REASON_PREEMPTION"],
}
"""Names that are not public, by module."""


def unsupported_ray(names: Mapping[str, Sequence[str]] = NAMES) -> str | None:
    """An error message if the installed Ray lacks one of these names."""
    missing = [f"{module}.{name}" for module, listed in names.items() for name in listed if not _exists(module, name)]
    if not missing:
        return None
    return (
        f"ray {ray.__version__} is installed and lacks {', '.join(missing)}, which training needs: install a "
        f"supported version, `pip install 'ray[data,train]{SUPPORTED}'`"
    )


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


def _exists(module: str, name: str) -> bool:
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return False
    return True
