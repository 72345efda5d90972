"""The few answers of the Hugging Face Hub that sending a folder needs, over real HTTP."""

import base64
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from serving import serving


@contextmanager
def upload_server(repositories):
    """Serves models `{"owner/name": {path: bytes}}`, into which clients send files, at an address that it yields."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, value, status=200, headers=()):
            body = json.dumps(value).encode()
            self.send_response(status)
            for key, text in [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]:
                self.send_header(key, text)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            name = "/".join(self.path.split("?")[0].split("/")[3:5])
            if not self.path.startswith("/api/models/"):
                self.answer({})
            elif name not in repositories:
                self.answer({}, 404, [("X-Error-Code", "RepoNotFound")])
            elif "/tree/" in self.path:
                self.answer([{"type": "file", "path": path, "size": 1, "oid": "0"} for path in repositories[name]])
            else:
                self.answer({"id": name, "sha": "0" * 40, "siblings": [], "tags": [], "private": True})

        do_HEAD = do_GET  # noqa: N815

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            if self.path == "/api/repos/create":
                given = json.loads(body)
                assert given.get("visibility") == "private" or given.get("private") is True
                name = f"{given['organization']}/{given['name']}"
                status = 409 if name in repositories else 200
                repositories.setdefault(name, {})
                self.answer({"url": f"http://{self.headers['Host']}/{name}"}, status)
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                self.answer(
                    {
                        "files": [
                            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files
                        ]
                    }
                )
            elif "/commit/" in self.path:
                name = "/".join(self.path.split("/")[3:5])
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                self.answer(
                    {"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}
                )
            else:
                self.answer({"errors": [], "warnings": []})  # of the card's head

        def log_message(self, *_):
            pass

    with serving(Handler) as host:
        yield f"http://{host}"
