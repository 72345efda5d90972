"""Spot notices as the clouds' metadata servers give them, over real HTTP."""

import socket
import threading
import time
from http.client import HTTPConnection

import pytest
from messages import says
from metadataserver import metadata_server

from declutr.trainer.worker.spotwatch import CLOUDS, AwsMetadata, GcpMetadata, SpotNotice, SpotWatch

NOTICE = b'{"action": "terminate", "time": "2026-11-23T08:22:00Z"}'


@pytest.fixture
def clouds(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # must not be asked
    with metadata_server() as clouds:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{clouds.host}/")
        monkeypatch.setenv("GCE_METADATA_HOST", clouds.host)
        yield clouds


def test_aws_is_asked_with_one_token_until_it_expires(clouds):
    metadata = AwsMetadata()
    assert [metadata.notice() for _ in range(3)] == [None] * 3
    assert clouds.tokens == 1
    clouds.expire = True
    assert metadata.notice() is None
    assert clouds.tokens == 2
    clouds.action = NOTICE
    assert metadata.notice() == SpotNotice("terminate", 1795422120.0)
    assert set(clouds.asked) == {"/latest/meta-data/spot/instance-action"}


def test_without_a_token_this_server_refuses(clouds):
    connection = HTTPConnection(clouds.host)
    connection.request("GET", "/latest/meta-data/spot/instance-action")
    assert connection.getresponse().status == 401


def test_gcp_says_true_or_false(clouds):
    metadata = GcpMetadata()
    assert metadata.notice() is None
    clouds.preempted = b"TRUE\n"
    notice = metadata.notice()
    assert notice.action == "preempted"
    assert notice.at == pytest.approx(time.time() + 30, abs=5)


@pytest.mark.parametrize("body", [b"<html>\n<body>no\n</html>", b"\xff"])
def test_a_token_that_is_none_is_an_error(clouds, body):
    clouds.token = body
    with pytest.raises(OSError, match="token"):
        AwsMetadata().notice()


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b'{"action": "stop"}', b"\xff", b'{"action": 1, "time": "x"}'])
def test_an_answer_that_is_none_is_an_error_and_no_notice(clouds, body):
    clouds.action = clouds.preempted = body
    for kind in CLOUDS.values():
        with pytest.raises(OSError, match=r"instance-action|preempted"):
            kind().notice()


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_server_that_does_not_answer_is_named_once(monkeypatch, log, cloud):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}")
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    watch = SpotWatch(cloud, "0" * 56)
    assert [watch.look() for _ in range(8)] == [True] * 8
    (line,) = log
    says(line, f"scaling.spot_notices = {cloud}", "metadata server")


def test_something_else_than_http_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.getsockname()[1]}")

        def answer():
            connection, _ = server.accept()
            connection.recv(4096)
            connection.sendall(b"220 mail ready\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(OSError, match="computeMetadata"):
            GcpMetadata().notice()
