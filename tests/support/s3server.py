"""An S3 server on this machine, and the credentials for it in the environment."""

import os
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen

import pyarrow.fs
import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server(wrap=None):
    """Yields a function from a name in a bucket to its address; the next server of this process begins empty.

    `wrap` may put a WSGI application in front of the server's own.
    """
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    if wrap is not None:
        server._server.app = wrap(server._server.app)
    host, port = server.get_host_and_port()
    endpoint = f"endpoint_override=http://{host}:{port}"
    with patch.dict(os.environ, CREDENTIALS):
        store, _ = pyarrow.fs.FileSystem.from_uri(f"s3://bucket?{endpoint}&allow_bucket_creation=true")
        store.create_dir("bucket")
        try:
            yield lambda name, bucket="bucket": f"s3://{bucket}/{name}?{endpoint}"
        finally:
            with urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")):
                server.stop()
