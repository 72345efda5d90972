"""A proxy in front of the S3 server that fails on demand: throttles, refuses, cuts answers short."""

import http.client
from contextlib import contextmanager
from urllib.parse import urlsplit

from s3server import s3_server
from serving import Handler, serving

_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'


class Faults:
    """The fault of the moment.

    Attributes:
        status: HTTP status of a refused request, with `code` as the store's own error code.
        left: how many requests still fail; None: all of them.
        after: how many requests of these methods still succeed before.
        methods: the HTTP methods that fail.
        cut: cut the body of an answer in half and close the connection, instead of an error.
        seen: methods of all requests, failed ones too.
    """

    def __init__(self):
        self.seen = []
        self.clear()

    def clear(self):
        self.status, self.code, self.left, self.methods, self.cut, self.after = 0, "", 0, (), False, 0

    def refuse(self, status, code, left=None, methods=("GET", "PUT", "POST", "DELETE", "HEAD"), after=0):
        self.clear()
        self.status, self.code, self.left, self.methods, self.after = status, code, left, methods, after

    def truncate(self, left=None):
        self.left, self.methods, self.cut = left, ("GET",), True

    def strikes(self, method):
        self.seen.append(method)
        if method not in self.methods or self.left == 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        if self.left is not None:
            self.left -= 1
        return True


@contextmanager
def faulty_store():
    """Yields a function from a name in a bucket to its address behind the proxy, and the faults."""
    with s3_server() as address:
        parts = urlsplit(address("x"))
        backend = parts.query.partition("http://")[2]
        faults = Faults()
        with serving(_handler(backend, faults)) as host:
            yield lambda name: f"s3://bucket/{name}?endpoint_override=http://{host}", faults


def _handler(backend, faults):
    class Proxy(Handler):
        def forward(self):
            chunked = self.headers.get("Transfer-Encoding") == "chunked"
            body = self.chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
            struck = faults.strikes(self.command)
            if struck and not faults.cut:
                error = _ERROR.format(code=faults.code, message=faults.code).encode()
                self.answer(faults.status, error, [("Content-Type", "application/xml")])
                return
            upstream = http.client.HTTPConnection(backend, timeout=60)
            upstream.request(self.command, self.path, body, dict(self.headers))
            answer = upstream.getresponse()
            content = answer.read()
            upstream.close()
            self.pass_on(answer.status, answer.getheaders(), content, cut=struck and len(content) > 1000)

        def chunks(self):
            """The body of a chunked request as it came, sizes of its chunks included."""
            lines = []
            while not lines or int(lines[-2].split(b";")[0], 16):
                size = self.rfile.readline()
                lines += [size, self.rfile.read(int(size.split(b";")[0], 16))]
                while (line := self.rfile.readline()) != b"\r\n":
                    lines[-1] += line
                lines[-1] += line
            return b"".join(lines)

        def pass_on(self, status, headers, content, cut=False):
            self.send_response_only(status)
            length = {name.lower(): value for name, value in headers}.get("content-length")
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Proxy, f"do_{method}", Proxy.forward)
    return Proxy
