"""A server of this process that answers over real HTTP."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open

    def answer(self, status, body=b"", headers=()):
        """Sends bytes, or anything else as JSON; the body of an answer to HEAD is left out."""
        if not isinstance(body, bytes):
            body, headers = json.dumps(body).encode(), [("Content-Type", "application/json"), *headers]
        self.send_response(status)
        for key, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    """Serves on a free port of this machine while the block runs; yields host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
