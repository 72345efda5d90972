"""A local Ray session after one whose process was killed."""

import os
import subprocess
import sys

import psutil
import pytest

from declutr.common.session import end_orphaned_agents

pytestmark = pytest.mark.ray

_SESSION = """
import time
from declutr.common.session import start_ray
start_ray(num_cpus=1)
print("started", flush=True)
time.sleep(600)
"""


def started() -> tuple[subprocess.Popen[str], psutil.Process]:
    """A session, and the agent of its own: other sessions may run on this machine."""
    environment = {**os.environ, "RAY_ADDRESS": ""}
    session = subprocess.Popen(
        [sys.executable, "-c", _SESSION], stdout=subprocess.PIPE, start_new_session=True, text=True, env=environment
    )
    assert session.stdout is not None
    assert session.stdout.readline() == "started\n"
    below = psutil.Process(session.pid).children(recursive=True)
    (agent,) = [process for process in below if process.name() == "ray::DashboardAgent"]
    return session, agent


def test_agents_of_killed_sessions_are_ended_and_those_of_living_ones_are_not():
    killed, orphan = started()
    raylet = orphan.parent()
    killed.kill()
    killed.wait()
    raylet.wait(60)  # it goes with its session, the agent does not
    living, agent = started()  # which ends orphans too, before it starts
    try:
        orphan.wait(10)
        end_orphaned_agents()
        with pytest.raises(psutil.TimeoutExpired):
            agent.wait(0.5)
    finally:
        living.terminate()
        living.wait(60)
