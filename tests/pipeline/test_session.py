"""A cluster or a local session that does not start, told in one message."""

import os
import socket
import subprocess
import sys
import time

import pytest
from messages import all_of, says
from processes import run_python

from declutr.common.cluster import cluster_problem, named_cluster, use_network_of
from declutr.common.errors import ConfigError
from declutr.common.session import _short_folder, start_ray


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_address_where_nobody_listens_is_named_at_once_and_one_without_a_port_is_left_to_ray(free_port, monkeypatch):
    begun = time.monotonic()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    for address, name in ((None, "RAY_ADDRESS = "), (f"ray://127.0.0.1:{free_port}", "address = ray://")):
        with pytest.raises(ConfigError, match=all_of(f"{name}127.0.0.1:{free_port}", "no Ray cluster")):
            start_ray(address=address)
    assert time.monotonic() - begun < 60
    for address in ("auto", "local", "somewhere", "host:", ":1", "host:port", ""):
        assert cluster_problem("address", address) is None
    says(cluster_problem("address", "127.0.0.1:99999") or "", "no Ray cluster")
    monkeypatch.setenv("RAY_ADDRESS", "one:1")
    assert (named_cluster("two:2"), named_cluster(None)) == (("address", "two:2"), ("RAY_ADDRESS", "one:1"))


@pytest.mark.slow
def test_a_head_that_was_lost_has_time_to_come_back(free_port):
    program = "import socket, sys, time; time.sleep(1.5); "
    program += "socket.create_server(('127.0.0.1', int(sys.argv[1]))).accept()"
    assert cluster_problem("address", f"127.0.0.1:{free_port}") is not None
    head = subprocess.Popen([sys.executable, "-c", program, str(free_port)])
    try:
        assert cluster_problem("address", f"127.0.0.1:{free_port}", wait_seconds=60) is None
    finally:
        head.kill()
        head.wait()


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_too_long_for_sockets_is_replaced_and_named(monkeypatch, log, name):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(name, "/tmp/short")
    assert _short_folder() is None
    monkeypatch.setenv(name, f"/tmp/{'long' * 12}")
    assert _short_folder() == "/tmp/ray"
    (line,) = log
    assert f"{name} = /tmp/long" in line
    assert sys.platform != "linux" or "at most 37 bytes" in line


def test_gloo_listens_at_the_hosts_address_in_the_cluster(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restores it after the test
        monkeypatch.delenv(name)
    use_network_of("203.0.113.7")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    use_network_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo", "without = every interface that begins so"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "given")
    use_network_of("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "given"


START = "from declutr.common.session import start_ray\nfrom declutr.common.errors import SessionError\n"
START += "try: start_ray(1)\nexcept SessionError as error: print(error)"


@pytest.mark.ray
def test_a_session_that_does_not_start_is_one_message(tmp_path):
    with socket.create_server(("0.0.0.0", 0)) as listener:
        env = {key: None for key in os.environ if key.startswith(("RAY_", "TMPDIR"))}
        env["RAY_GCS_SERVER_PORT"] = str(listener.getsockname()[1])
        env["RAY_py_gcs_connect_timeout_s"] = "3"  # instead of 30
        ran = run_python("-c", START, folder=tmp_path, env=env, check=False)
    says(ran.stdout, "Ray did not start")
    assert "MiB" in ran.stdout
