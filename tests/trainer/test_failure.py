"""Which of many errors is the reason; spot notices as the clouds' metadata servers give them."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from messages import says
from metadataserver import metadata_server
from processes import run_python
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError

from declutr.trainer.driver import group
from declutr.trainer.driver.continuation import FAILURES
from declutr.trainer.driver.failure import GroupFailure, blame_memory, describe, oom_kills
from declutr.trainer.worker.spotwatch import CLOUDS, SpotWatch, aws_notice, gcp_notice

LEFT = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:33291")
DEAD = RayActorError(error_msg="ActorMetadata(\n hostname='spot-3',\n node_id='b1', pid=30750,\n) died unexpectedly")
SYSTEM = RayActorError(error_msg="The actor died.\n\tpid: 4711\n\tip: 10.0.0.9\nThe process ended, SYSTEM_ERROR.")


@pytest.mark.parametrize(
    ("errors", "summary", "kind"),
    [
        ({0: LEFT, 2: ValueError("row 17")}, ("worker 2", "ValueError: row 17"), "ValueError: row #"),
        ({0: LEFT, 1: DEAD}, ("worker 1", "host spot-3", "pid 30750", "died", "out of memory"), "death"),
        ({0: DEAD, 1: DEAD}, ("worker 0", "host spot-3", "pid 30750", "died", "1 more"), "death"),
        ({1: RayActorError(preempted=True)}, ("worker 1", "died", "node"), "death"),
        ({1: SYSTEM}, ("worker 1", "host 10.0.0.9", "pid 4711", "died"), "death"),
        ({1: LEFT}, ("worker 1", "lost", "RuntimeError"), "death"),
    ],
)
def test_the_reason_is_the_workers_own(errors, summary, kind, tmp_path):
    failure = describe(WorkerGroupError("everything\nRay said", errors))
    says(failure.summary, summary)
    assert (failure.kind, failure.lost) == (kind, False)
    assert "\n" not in failure.summary
    failure.log(tmp_path, 12)
    account = (tmp_path / FAILURES).read_text()
    says(account, "step 12", failure.summary)
    assert "Ray said" in account
    coordinator = describe(RayActorError(error_msg="The actor died."))
    says(coordinator.summary, "coordinates the workers")
    assert coordinator.lost


def test_rays_paragraph_on_a_death_is_left_out_and_nothing_else():
    """Through the function by which Ray prints what its raylets report, in a process that began as the command does."""
    lines = ["A worker died or was killed while executing a task by an unexpected system error.", "No memory is left."]
    report = {"lines": lines, "pid": "raylet", "is_err": False}
    code = "import declutr.trainer.train; from ray._private.worker import print_to_stdstream as show"
    done = run_python("-c", f"{code}; show({report!r}, False)")
    says(done.stdout, "No memory", "left")
    assert "died" not in done.stdout + done.stderr


@pytest.fixture
def small_cgroup():
    """The `cgroup.procs` of a container that holds 64 MiB."""
    parents = {"memory.limit_in_bytes": Path("/sys/fs/cgroup/memory"), "memory.max": Path("/sys/fs/cgroup")}
    limit, parent = next((limit, at) for limit, at in parents.items() if at.is_dir())
    group = parent / f"declutr-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 * 2**20))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory cgroup of its own can be made here ({error.strerror})")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_container_that_is_too_small_is_named(small_cgroup):
    before, failure = oom_kills(), GroupFailure("worker 0 died", "death", "")
    assert blame_memory(failure, before) == failure
    program = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); bytearray(b'x' * 2**28)"
    assert run_python("-c", program, small_cgroup, check=False).returncode == -signal.SIGKILL
    summary = blame_memory(failure, before).summary
    says(summary, "worker 0 died", "1 process", "memory")
    assert "scaling.num_workers" in summary


@pytest.fixture
def clouds(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    with metadata_server() as clouds:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{clouds.host}/")
        monkeypatch.setenv("GCE_METADATA_HOST", clouds.host)
        yield clouds


def test_aws_answers_with_a_time_and_gcp_with_true_or_false_and_another_answer_is_an_error(clouds, monkeypatch):
    assert aws_notice() is gcp_notice() is None
    clouds.action, clouds.preempted = b'{"action": "terminate", "time": "2026-11-23T08:22:00Z"}', b"TRUE\n"
    assert aws_notice() == ("terminate", 1795422120.0)
    assert "/latest/meta-data/spot/instance-action" in clouds.asked
    action, end = gcp_notice()
    assert (action, end) == ("preempted", pytest.approx(time.time() + 30, abs=5))
    for body in (b"", b"null", b"{}", b'{"action": "stop"}', b"\xff", b'{"action": 1, "time": "x"}'):
        clouds.action = clouds.preempted = body
        for notice in CLOUDS.values():
            with pytest.raises(OSError, match=r"instance-action|preempted"):
                notice()
    for body in (b"<html>\n<body>no\n</html>", b"\xff"):
        clouds.token = body
        with pytest.raises(OSError, match="token"):
            aws_notice()
    with socket.create_server(("127.0.0.1", 0)) as server:  # something else than HTTP
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")

        def answer():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"220 mail ready\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="computeMetadata"):
            gcp_notice()


@pytest.mark.parametrize("cloud", [*CLOUDS, "no scheme"])
def test_a_server_that_does_not_answer_is_named_once_and_does_not_end_the_watch(monkeypatch, log, cloud):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    schemeless, cloud = cloud == "no scheme", cloud if cloud in CLOUDS else "aws"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "169.254.169.254" if schemeless else f"http://{host}")
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    watch = SpotWatch(cloud, "0" * 56)
    assert [watch.look() for _ in range(8)] == [True] * 8
    (line,) = log
    facts = ("unknown url type", "169.254.169.254") if schemeless else ("metadata server",)
    says(line, f"scaling.spot_notices = {cloud}", *facts)


def test_the_allocator_of_workers_is_behind_what_the_user_loads_and_left_out_where_its_path_is_cut(log):
    assert group._libraries("/ray/x.so", "") == "/ray/x.so"
    assert group._libraries("/ray/x.so", "/users.so") == "/users.so:/ray/x.so"
    for path in ("/my ray/x.so", "/a:b/x.so"):
        assert [group._libraries(path, "/users.so") for _ in range(2)] == ["", ""]
    assert len(log) == 2, "one for each path"
    says(log[0], "/my ray/x.so", "LD_PRELOAD", "space", "folder")
