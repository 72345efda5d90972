"""A file server with ranges and entity tags, over real HTTP on this machine, that can break off."""

import hashlib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from serving import serving


class Served:
    """What is served and what was asked for.

    Attributes:
        files: content by path (without the leading slash); may be changed while the server runs.
        break_after: connections still to be broken, with the number of bytes each gets.
        ranges: whether ranges are honoured.
        requests: `(path, Range header or "")` of every request.
    """

    def __init__(self, files):
        self.files = dict(files)
        self.break_after = []
        self.ranges = True
        self.requests = []
        self.address = ""


@contextmanager
def file_server(files):
    served = Served(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path, asked = self.path.lstrip("/"), self.headers.get("Range", "")
            served.requests.append((path, asked))
            content = served.files.get(path)
            if content is None:
                self.send_error(404)
                return
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            start, whole = 0, len(content)
            if asked and served.ranges and self.headers.get("If-Range") == tag:
                start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= whole > 0:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{whole - 1}/{whole}")
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(whole - start))
            self.end_headers()
            if served.break_after:
                self.wfile.write(content[start : start + served.break_after.pop(0)])
                self.close_connection = True
            else:
                self.wfile.write(content[start:])

        def log_message(self, *_):
            pass

    with serving(Handler) as host:
        served.address = f"http://{host}"
        yield served
