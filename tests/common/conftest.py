"""A server of S3's protocol, and a folder to send."""

import pytest
from mediafiles import spread
from s3server import s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(tmp_path):
    return spread(tmp_path / "local", {"a.bin": bytes(range(256)), "deep/b c.txt": b"b", "empty": b""})
