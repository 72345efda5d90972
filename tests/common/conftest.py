"""A server of S3's protocol, and a folder to send."""

import pytest
from s3server import s3_server


@pytest.fixture(scope="module")
def server():
    with s3_server() as address:
        yield address


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "local"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(256)))
    (folder / "deep" / "b c.txt").write_text("b")
    (folder / "empty").write_bytes(b"")
    return folder
