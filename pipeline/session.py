"""A quiet Ray session: a cluster where one is named, this machine otherwise."""

import logging
import os
import warnings
from dataclasses import dataclass

# Ray reads these when it is imported or started, hence here and before `import ray`.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
# On a busy machine a session is otherwise given up before it has started.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

import psutil
import ray
from ray.data import DataContext
from ray.util.annotations import RayDeprecationWarning

from pipeline.session_config import SessionConfig as SessionConfig


@dataclass
class _Local:
    """Was this process's session started here, by us?"""

    started: bool = False


_local = _Local()
_AGENT = "ray::DashboardAgent"


def start_ray(num_cpus: int | None = None, address: str | None = None) -> None:
    """Attaches to a cluster when `address` or RAY_ADDRESS names one, else starts a local session; both stay quiet.

    A session that this process has already is kept, unless it was started here with fewer CPUs than are asked for now:
    work that waits for a CPU which never comes says nothing.
    """
    if _local.started and num_cpus is not None and ray.is_initialized() and ray.cluster_resources()["CPU"] < num_cpus:
        ray.shutdown()
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS")
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        _local.started = not address
        if address:
            ray.init(address=address, **quiet)
        else:
            end_orphaned_agents()
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # How often work is begun anew has no named parameter yet, and `ray_remote_args` goes in 2.64 (hence the bound in
    # pyproject.toml): nothing that a user could mend.
    warnings.filterwarnings("ignore", r"`ray_remote_args(_fn)?` is deprecated", RayDeprecationWarning)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


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
