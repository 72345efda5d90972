"""The Ray cluster that a setting names, before Ray is asked for it. Imports no Ray."""

import os
import socket
import time

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


def named_cluster(address: str | None) -> tuple[str, str]:
    """The setting that names a cluster, and its value; an empty one: a session of this machine."""
    return ("address", address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))


def cluster_problem(name: str, address: str, wait_seconds: float = 0.0) -> str | None:
    """A sentence on a cluster that does not answer; Ray itself takes almost two minutes to give it up.

    Args:
        name: of the setting.
        address: its value; only HOST:PORT, also with ray:// before it, can be asked.
        wait_seconds: time in which a head that was lost may come back; without it one try decides.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return None
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                return (
                    f"{name} = {address}: no Ray cluster answers there ({error}); start it (`ray start --head`), "
                    "correct the address, or leave it out for a session on this machine"
                )
            time.sleep(_PAUSE_SECONDS)
        else:
            return None
