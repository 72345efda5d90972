"""A local session that does not start: one message, no traceback. Real processes of Ray."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from messages import says

ROOT = Path(__file__).resolve().parents[2]
START = "from declutr.common.session import start_ray\nfrom declutr.common.cluster import SessionError\n"
START += "try: start_ray(1)\nexcept SessionError as error: print(error)"


@pytest.mark.ray
def test_a_session_that_does_not_start_is_one_message(tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        bare = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TMPDIR"))}
        port = str(taken.getsockname()[1])
        # Ray gives up after 3 seconds instead of 30.
        quick = {"RAY_py_gcs_connect_timeout_s": "3"}
        environment = bare | quick | {"PYTHONPATH": str(ROOT / "src"), "RAY_GCS_SERVER_PORT": port}
        ran = subprocess.run(
            [sys.executable, "-c", START], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )
    says(ran.stdout, "Ray did not start")
    assert "MiB" in ran.stdout
