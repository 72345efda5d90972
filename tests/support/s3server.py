"""An S3 server on this machine, with its credentials in the environment; one that fails on demand."""

import os
from contextlib import contextmanager
from unittest.mock import patch
from urllib.request import Request, urlopen

import pyarrow.fs
import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server(wrap=None):
    """Yields a function from a name to its address; the next server of this process begins empty."""
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


_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>{0}</Message></Error>'


class Faults:
    """Throttles, refuses, cuts answers short: the fault of the moment, in front of the server's application."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.status, self.code, self.left, self.methods, self.cut, self.after = 0, "", 0, (), False, 0

    def refuse(self, status, code, left=None, methods=("GET", "PUT", "POST", "DELETE", "HEAD"), after=0):
        """Fails `left` requests (None: all) by status and the store's own error code, after `after` that succeed."""
        self.clear()
        self.status, self.code, self.left, self.methods, self.after = status, code, left, methods, after

    def truncate(self, left=None):
        self.left, self.methods, self.cut = left, ("GET",), True

    def strikes(self, method):
        if method not in self.methods or self.left == 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.left is not None:
            self.left -= 1
        return True

    def wrap(self, application):
        def answer(environ, start_response):
            method = environ["REQUEST_METHOD"]
            if not self.strikes(method):
                return application(environ, start_response)
            if self.cut:
                content = b"".join(application(environ, start_response))
                return [content[: len(content) // 2] if len(content) > 1000 else content]
            chunked = environ.get("HTTP_TRANSFER_ENCODING") == "chunked"
            environ["wsgi.input"].read(-1 if chunked else int(environ.get("CONTENT_LENGTH") or 0))
            error = _ERROR.format(self.code).encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(error)))]
            start_response(f"{self.status} {self.code}", headers)
            return [] if method == "HEAD" else [error]

        return answer


@contextmanager
def faulty_store():
    faults = Faults()
    with s3_server(faults.wrap) as address:
        yield address, faults
