"""A quiet Ray session: a cluster where one is named, this machine otherwise."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.cluster import cluster_problem, named_cluster
from common.config import ConfigError
from common.console.logs import get_logger

# Ray reads these when it is imported or started, hence here and before `import ray`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# On a busy machine a session is otherwise given up before it has started.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

import psutil
import ray
from ray.data import DataContext
from ray.util.annotations import RayDeprecationWarning

from common.session_config import SessionConfig as SessionConfig
from common.session_config import SessionError


@dataclass
class _Local:
    """Was this process's session started here, by us?"""

    started: bool = False


_local = _Local()
_AGENT = "ray::DashboardAgent"
_SHORT_FOLDER = "/tmp/ray"  # Ray's own where TMPDIR is not set
_SOCKET_BYTES = 107 if sys.platform == "linux" else 103  # longest path of a Unix socket
_SESSION_BYTES = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.1")


def start_ray(num_cpus: int | None = None, address: str | None = None, wait_seconds: float = 0.0) -> None:
    """Attaches to a cluster when `address` or RAY_ADDRESS names one, else starts a local session; both stay quiet.

    A session that this process has already is kept, unless it was started here with fewer CPUs than are asked for now:
    work that waits for a CPU which never comes says nothing.

    Args:
        num_cpus: of a local session; None: all of this machine's.
        address: of a cluster; None: RAY_ADDRESS.
        wait_seconds: time in which a cluster that was lost may come back.

    Raises:
        ConfigError: no cluster answers there.
        SessionError: no session starts on this machine.
    """
    if _local.started and num_cpus is not None and ray.is_initialized() and ray.cluster_resources()["CPU"] < num_cpus:
        ray.shutdown()
    if not ray.is_initialized():
        with _deaf_to_hangups():
            _init(num_cpus, address, wait_seconds)
        _end_at_hangup()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # How often work is begun anew has no named parameter yet, and `ray_remote_args` goes in 2.64 (hence the bound in
    # pyproject.toml): nothing that a user could mend.
    warnings.filterwarnings("ignore", r"`ray_remote_args(_fn)?` is deprecated", RayDeprecationWarning)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _init(num_cpus: int | None, address: str | None, wait_seconds: float) -> None:
    name, address = named_cluster(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    _local.started = not address
    if address:
        if problem := cluster_problem(name, address, wait_seconds):
            raise ConfigError("ray", [problem])
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ConfigError("ray", [f"{name} = {address}: {str(error).splitlines()[0]}"]) from error
    else:
        end_orphaned_agents()
        folder = {"_temp_dir": short} if (short := _short_folder()) else {}
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet, **folder)
        except Exception as error:
            if type(error) not in (Exception, RuntimeError):  # with these two Ray says that its processes do not start
                raise
            raise SessionError(_not_started(error)) from error


def _not_started(error: Exception) -> str:
    """Why a local session may not have started, with the room that it found."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    room = ", ".join(
        f"{place} {shutil.disk_usage(place).free // 2**20:,} MiB"
        for place in (folder, "/dev/shm")
        if os.path.isdir(place)  # noqa: PTH112
    )
    return (
        f"Ray does not start on this machine: {str(error).splitlines()[0]} Free: {room}, memory "
        f"{psutil.virtual_memory().available // 2**20:,} MiB; load {os.getloadavg()[0]:.0f}. Make room, or wait until "
        f"the machine is less busy; then the same command continues. Ray's logs: {folder}/ray"
    )


def _short_folder() -> str | None:
    """A folder for the session where that of TMPDIR would make the paths of its sockets too long; else None."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    if name is None or len(os.fsencode(f"{os.environ[name]}/ray")) + _SESSION_BYTES <= _SOCKET_BYTES:
        return None
    get_logger().warning(
        "%s = %s is too long for the sockets of Ray (at most %d bytes): its session lies in %s",
        name,
        os.environ[name],
        _SOCKET_BYTES - _SESSION_BYTES - len("/ray"),
        _SHORT_FOLDER,
    )
    return _SHORT_FOLDER


@contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """Blocks SIGHUP for processes that start in it: the process that started them ends them in good order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_at_hangup() -> None:
    """Treats SIGHUP as SIGTERM, which Ray has taken to end its processes; under `nohup` it stays ignored."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


def end_orphaned_agents() -> None:
    """Ends what sessions of this user that were killed have left on the port that the next one wants.

    Such a session's agent first tells of the end of its raylet, for a minute, to a server that is gone as well. Ray
    gives each agent the same port; while it is taken a new session waits for it, for 4 seconds.
    """
    for process in psutil.process_iter():
        try:
            if process.name() != _AGENT or process.uids().real != os.getuid():
                continue
            parent = process.parent()
            if parent is None or parent.name() != "raylet":
                process.kill()
        except psutil.Error:  # gone by itself, or not ours to ask
            continue
