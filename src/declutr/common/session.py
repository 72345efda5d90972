"""A quiet Ray session on the configured cluster, or on this machine if none is configured."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path

from declutr.common.cluster import cluster_problem, named_cluster, no_cluster
from declutr.common.console.logs import get_logger
from declutr.common.errors import ConfigError, SessionError

# Ray reads these when it is imported or started, so they are set before `import ray`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# On a busy machine Ray otherwise gives up before the session has started.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

import psutil
import ray
from ray.util.annotations import RayDeprecationWarning

started_here = False  # True if `start_ray` started this process's session on this machine
_SHORT_FOLDER = "/tmp/ray"  # Ray's default if TMPDIR is not set
_SOCKET_BYTES = 107 if sys.platform == "linux" else 103  # longest path of a Unix socket
_SESSION_BYTES = len("/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store.1")


def start_ray(num_cpus: int | None = None, address: str | None = None, wait_seconds: float = 0.0) -> None:
    """Connects to the cluster that `address` or RAY_ADDRESS names, or starts a local session.

    An existing session of this process is kept, unless it was started here with fewer CPUs than requested now: work
    would silently wait for a CPU that never becomes free.

    A local session has `num_cpus` CPUs, or all of this machine. A lost cluster has `wait_seconds` to come back. The
    signal handlers of this process stay as they are.
    """
    if started_here and num_cpus is not None and ray.is_initialized() and ray.cluster_resources()["CPU"] < num_cpus:
        ray.shutdown()
    if not ray.is_initialized():
        _in_lasting_thread(num_cpus, address, wait_seconds)
    if threading.current_thread() is threading.main_thread():
        # Ray replaces the handler below Python's in any thread, and ends a process that takes 3 s to stop in order.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    from ray.data import DataContext  # loads pandas, which would delay the start of a session

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    logging.getLogger("ray.data.exceptions").addFilter(_hide)
    # The number of retries has no named parameter yet, and `ray_remote_args` is removed in 2.64 (see the bound in
    # pyproject.toml). A user can do nothing about this warning.
    warnings.filterwarnings("ignore", r"`ray_remote_args(_fn)?` is deprecated", RayDeprecationWarning)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _hide(record: logging.LogRecord) -> bool:
    """Keeps Ray Data's stack trace of an error in its file, and off the screen: whoever catches the error speaks."""
    record.hide = True
    return True


def _in_lasting_thread(num_cpus: int | None, address: str | None, wait_seconds: float) -> None:
    """Starts Ray in a thread that lives as long as this process."""
    started = Future[None]()

    def start() -> None:
        # Ray's processes inherit this, so that a closed terminal does not end them before their parent does in order.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            _init(num_cpus, address, wait_seconds)
            started.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            started.set_exception(error)
        threading.Event().wait()  # Linux kills Ray's head when the thread that started it ends

    # Not the main thread, where `ray.init` would replace this process's handler of SIGTERM.
    threading.Thread(target=start, name="declutr-ray", daemon=True).start()
    started.result()


def _init(num_cpus: int | None, address: str | None, wait_seconds: float) -> None:
    global started_here
    name, address = named_cluster(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    started_here = not address
    if address:
        if problem := cluster_problem(name, address, wait_seconds):
            raise ConfigError("ray", [problem])
        try:
            ray.init(address=address, **quiet)
        except ConnectionError as error:
            raise ConfigError("ray", [no_cluster(name, address, error)]) from error
    else:
        short = _short_folder()
        folder = {"_temp_dir": short} if short else {}
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet, **folder)
        except Exception as error:
            if type(error) not in (Exception, RuntimeError):  # Ray raises these two if its processes do not start
                raise
            raise SessionError(_not_started(error, short)) from error


def _not_started(error: Exception, short: str | None) -> str:
    """An error message for a local session that did not start, with the free disk and memory."""
    folder = Path(short or Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray"))
    room = ", ".join(
        f"{place} {shutil.disk_usage(place).free // 2**20:,} MiB"
        for place in (folder.parent, Path("/dev/shm"))
        if place.is_dir()
    )
    return (
        f"Ray did not start on this machine: {str(error).splitlines()[0]} Free: {room}, memory "
        f"{psutil.virtual_memory().available // 2**20:,} MiB; load {os.getloadavg()[0]:.0f}. Free memory or disk "
        f"space, or wait until the machine is less busy; then run the same command again. Ray's logs: {folder}"
    )


def _short_folder() -> str | None:
    """A folder for the session if TMPDIR would make the paths of its sockets too long; else None."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ), None)
    if name is None or len(os.fsencode(f"{os.environ[name]}/ray")) + _SESSION_BYTES <= _SOCKET_BYTES:
        return None
    get_logger().warning(
        "%s = %s is too long for the paths of Ray's sockets (at most %d bytes); using %s for the session",
        name,
        os.environ[name],
        _SOCKET_BYTES - _SESSION_BYTES - len("/ray"),
        _SHORT_FOLDER,
    )
    return _SHORT_FOLDER
