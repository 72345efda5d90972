"""Settings of a Ray session and its cluster, and a check that it answers, without Ray; its hosts' network."""

import os
import socket
import sys
import time
from pathlib import Path

from pydantic import Field

from declutr.common.config import Strict

_CONNECT_SECONDS = 3.0
_PAUSE_SECONDS = 0.5


def named_cluster(address: str | None, setting: str = "address") -> tuple[str, str]:
    """The setting that names a cluster, and its value; an empty value stands for a local session."""
    return (setting, address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))


def in_session() -> bool:
    """True if this process has a session of Ray, which is used as it is."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def started_cluster() -> str | None:
    """Address of the cluster that `ray start` has joined this host to; None if there is none or it does not answer."""
    try:
        address = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return None
    return address if address and cluster_problem("", address) is None else None


def cluster_problem(
    name: str,  # name of the setting
    address: str,  # its value; only HOST:PORT, with or without ray://, can be checked
    wait_seconds: float = 0.0,  # time for a lost head node to come back; 0 means a single attempt
) -> str | None:
    """An error message if the cluster does not answer."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return None
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            # Ray itself would wait almost two minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:  # OverflowError: a port of twenty digits
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                return no_cluster(name, address, error)
            time.sleep(_PAUSE_SECONDS)
        else:
            return None


def no_cluster(name: str, address: str, error: Exception) -> str:
    """An error message for the address of a cluster, as in `cluster_problem`, with its error's first sentence."""
    why = str(error).partition("\n")[0].partition(". ")[0]  # Ray goes on with advice about its own setting
    advice = "start it (`ray start --head`), correct the address, or leave it out for a session on this machine"
    return f"{name} = {address}: no Ray cluster answers there ({why}); {advice}"


def use_network_of(address: str) -> None:
    """Lets gloo and NCCL listen at this host's address, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            # Gloo would take the address of the host's name, which Debian makes 127.0.1.1; NCCL the first interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a name for a prefix without `=`


class SessionConfig(Strict):
    """The place where the work runs, without influence on results."""

    num_cpus: int | None = Field(default=None, ge=1)
    """Logical CPUs of a local session; null: all of this machine."""
    address: str | None = None
    """Address of a running cluster (`auto`: this host's). RAY_ADDRESS has the same effect."""
