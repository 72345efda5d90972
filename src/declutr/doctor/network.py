"""Exposure of Ray to other machines: listening ports, addresses of this machine, the token."""

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil

from declutr.common.console.terminal import shorten
from declutr.doctor.facts import ray_environment
from declutr.doctor.finding import Finding, make_finding

_WILDCARDS = ("0.0.0.0", "::")
_KINDS = (  # kind of a Ray process, parts of its command line
    *(("dashboard", ("dashboard/dashboard.py",)), ("Ray client", ("util.client.server",))),
    *(("gcs", ("gcs_server",)), ("raylet", ("raylet",)), ("agent", ("agent.py", "runtime_env/agent"))),
    ("worker", ("ray::", "default_worker.py")),
)
_RUN_CODE = ("dashboard", "Ray client")


@dataclass(frozen=True)
class ListeningPort:
    """Port of a Ray process: kind of process, address it listens on, port."""

    kind: str
    address: str
    port: int


@dataclass(frozen=True)
class Exposure:
    """Parts of this node that other machines can reach.

    Attributes:
        listeners: ports of Ray's processes; None if this user may not see them.
        addresses: addresses of this node's interfaces.
        auth_mode: RAY_AUTH_MODE of the node's Ray.
        token: source of the token; empty if there is none.
        token_mode: permissions of its file; None if it is not a file.
        token_owned: whether the file belongs to the user who runs Ray.
    """

    listeners: tuple[ListeningPort, ...] | None
    addresses: tuple[str, ...]
    auth_mode: str
    token: str
    token_mode: int | None
    token_owned: bool


def gather() -> Exposure:
    """Gather the exposure of this node."""
    environment = ray_environment()
    addresses = {
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    token, mode, owned = find_token(environment)
    auth = environment.get("RAY_AUTH_MODE", "")
    return Exposure(_listeners(), tuple(sorted(addresses)), auth, token, mode, owned)


def find_token(environment: dict[str, str]) -> tuple[str, int | None, bool]:
    """Find the token in Ray's search order (value, path, home); return its source, permissions and ownership."""
    if environment.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", None, True
    given = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path(environment.get("HOME", "~")).expanduser() / ".ray" / "auth_token"
    try:
        status = path.stat()
    except OSError:
        return "", None, False
    return str(path), stat.S_IMODE(status.st_mode), status.st_uid == os.geteuid()


def _listeners() -> tuple[ListeningPort, ...] | None:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return None
    found = set()
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.pid is not None:
            kind = _kind(connection.pid)
            if kind:
                found.add(ListeningPort(kind, connection.laddr.ip, connection.laddr.port))
    return tuple(sorted(found, key=lambda listener: (listener.kind, listener.address, listener.port)))


def _kind(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    kind = next((kind for kind, marks in _KINDS if "ray" in command and any(m in command for m in marks)), "")
    # A dashboard limited to this host still publishes metrics to all; code cannot be run through that port.
    return "metrics" if kind == "dashboard" and "--host=127.0.0.1" in command else kind


def check_ports(node: str, facts: Exposure) -> Finding:
    """Check whether a Ray port listens on a public address."""
    name = "ports open to others"
    if facts.listeners is None:
        return make_finding(name, node, "not visible to this user", warn=True, remedy="run as the user who started Ray")
    public = {address for address in facts.addresses if ipaddress.ip_address(address).is_global}
    wide = [listener for listener in facts.listeners if listener.address in (*_WILDCARDS, *public)]
    guarded = facts.auth_mode == "token" and bool(facts.token)
    open_code = [listener for listener in wide if listener.kind in _RUN_CODE]
    named = [*open_code, *(listener for listener in wide if listener not in open_code)]
    ports = ", ".join(f"{listener.kind} {listener.address}:{listener.port}" for listener in named)
    at = f" on {', '.join(sorted(public))}" if public else ""
    return make_finding(
        name,
        node,
        f"{shorten(ports, 160)}{at}"
        if public or open_code
        else f"{len(wide)}, to this network only"
        if wide
        else "none",
        limit="no public address, and no dashboard reachable from other hosts",
        fail=bool(wide and public and not guarded),
        warn=bool((wide and public) or (open_code and not guarded)),
        remedy="start Ray with --dashboard-host=127.0.0.1 and --node-ip-address=<private address>, close these ports "
        "in the firewall or security group, and turn tokens on (RAY_AUTH_MODE=token)",
    )


def check_token(node: str, facts: Exposure) -> Finding:
    """Check that the cluster is closed to clients without its token."""
    name, limit = "token authentication", "RAY_AUTH_MODE=token, token readable by its owner only"
    if facts.auth_mode != "token":
        return make_finding(
            name, node, f"RAY_AUTH_MODE={facts.auth_mode or '(not set)'}", limit=limit, fail=True,
            remedy="anyone who reaches a port can run code as this user: `ray get-auth-token --generate`, the same "
            "~/.ray/auth_token on every node, RAY_AUTH_MODE=token before every `ray start` and command",
        )  # fmt: skip
    if not facts.token:
        return make_finding(
            name, node, "no token", limit=limit, fail=True,
            remedy="copy ~/.ray/auth_token of the head to this node; without it the node never joins, without an error",
        )  # fmt: skip
    loose = facts.token_mode is not None and bool(facts.token_mode & 0o077)
    value = facts.token if facts.token_mode is None else f"{facts.token}, mode {facts.token_mode:03o}"
    return make_finding(
        name, node, value, limit=limit, fail=loose or not facts.token_owned, remedy=f"chmod 600 {facts.token}"
    )
