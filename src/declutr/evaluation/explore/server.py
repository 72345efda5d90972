"""Server of the page and its answers for one person on this machine, on the standard library's server.

Other users of the machine and other websites must not read the corpus. The socket listens on 127.0.0.1 only. Every
request needs the token from the printed address. A Host other than this address is refused, because an attacker's
domain name can point here (DNS rebinding). Answers carry no permission for other origins, and requests that a browser
marks as coming from another site are refused.
"""

import json
import secrets
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs

from declutr.evaluation.explore.explorer import ExploreError, Explorer, Json
from declutr.evaluation.report.markup import policy_hash

ADDRESS = "127.0.0.1"
TOKEN_HEADER = "X-Declutr-Token"
_HTTP_PORT = 80  # browsers omit it from Host
_IDLE_SECONDS = 30
_MAX_CONNECTIONS = 64
_MAX_TOKEN_QUERY = 200  # characters of an address searched for the token
_WHERE = "open the address that `declutr explore` printed"


class _Refusal(Exception):  # noqa: N818 - the request is refused, nothing is broken
    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


def listen(port: int = 0) -> socket.socket:
    """Listens on a port of this machine, before anything is loaded for it; 0 takes a free one.

    Raises:
        OSError: the port is taken or not permitted.
    """
    return socket.create_server((ADDRESS, port))


class ExploreServer(ThreadingTCPServer):
    """Server that answers on a listening socket until stopped: a thread per connection, at most 64 connections."""

    daemon_threads = True

    def __init__(self, explorer: Explorer, listening: socket.socket) -> None:
        self.explorer = explorer
        html, self.policy = _page()
        self.html = html.encode()
        self.map = _encoded(explorer.map())
        self.token = secrets.token_urlsafe(32)
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()  # unbound
        self.socket = listening
        port = self.server_address[1]
        ends = [f":{port}", ""] if port == _HTTP_PORT else [f":{port}"]
        self.hosts = {f"{name}{end}" for name in (ADDRESS, "localhost") for end in ends}

    @property
    def url(self) -> str:
        """Address of the page with the token; whoever has it can read the corpus."""
        return f"http://{ADDRESS}:{self.server_address[1]}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close the connection if there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the browser has closed the connection."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    server_version = "declutr"
    sys_version = ""
    timeout = _IDLE_SECONDS

    def do_GET(self) -> None:
        """Send the page, an answer, or a refusal."""
        try:
            self._refuse_strangers()
            path, _, query = self.path.partition("?")
            self._refuse_guesses(path, query)
            if path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.html)
                return
            self._send(HTTPStatus.OK, "application/json", self._answer(path, query))
        except _Refusal as refusal:
            self._send(refusal.status, "application/json", _encoded({"error": str(refusal)}))

    def _refuse_strangers(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            words = f"the request has another Host than this server; {_WHERE} (with `ssh -L`, keep its port)"
            raise _Refusal(HTTPStatus.MISDIRECTED_REQUEST, words)
        site = self.headers.get("Sec-Fetch-Site", "none")
        if self.headers.get("Sec-Fetch-Mode") != "navigate" and site not in ("same-origin", "none"):
            raise _Refusal(HTTPStatus.FORBIDDEN, f"the request comes from another site's page; {_WHERE}")

    def _refuse_guesses(self, path: str, query: str) -> None:
        """Check the token: the page has it in its address, questions have it in a header."""
        in_address = parse_qs(query[:_MAX_TOKEN_QUERY]).get("token", [""])[0] if path == "/" else ""
        given = (in_address or self.headers.get(TOKEN_HEADER, "")).encode(errors="replace")
        if not secrets.compare_digest(given, self.server.token.encode()):
            raise _Refusal(HTTPStatus.FORBIDDEN, f"the token is missing or wrong; {_WHERE}")

    def _answer(self, path: str, query: str) -> bytes:
        try:
            given = parse_qs(query, keep_blank_values=True, max_num_fields=8)
        except ValueError as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        explorer = self.server.explorer
        try:
            match path:
                case "/api/map":
                    return self.server.map
                case "/api/search":
                    return _encoded(explorer.search(given.get("text", [""])[0]))
                case "/api/neighbours":
                    return _encoded(explorer.neighbours(_number(given.get("row", [""])[0])))
        except ExploreError as error:
            raise _Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        raise _Refusal(HTTPStatus.NOT_FOUND, "this address does not exist here")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: queries are private, and errors appear on the page."""


def _number(text: str) -> int:
    """Parse a row number; 18 digits exceed every index and stay below Python's limit for integers."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ExploreError(f"row = {text[:40]!r}: must be a number from 0 on")
    return int(text)


def _encoded(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _page() -> tuple[str, str]:
    """Return the whole document and its Content-Security-Policy.

    The policy names the style and the script by their hashes. The script may contact only the page's own server.
    """
    report, here = files("declutr.evaluation.report"), files(__package__)
    style = "".join(place.read_text(encoding="utf-8") for place in (report / "style.css", here / "page.css"))
    script = "".join((here / name).read_text(encoding="utf-8") for name in ("map.js", "page.js"))
    html = (here / "page.html").read_text(encoding="utf-8")
    html = html.replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src {policy_hash(style)}; script-src {policy_hash(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy
