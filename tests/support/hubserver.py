"""The few answers of the Hugging Face Hub that reading a dataset needs, from a dictionary, over real HTTP."""

import json
import re
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

from serving import Handler, serving

SHA, CONVERTED_SHA = "0123456789abcdef0123456789abcdef01234567", "f" * 40
_API = re.compile(r"/api/datasets/(owner/\w+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?$")
_FILE = re.compile(r"/datasets/(owner/\w+)/resolve/([^/]+)/(.+)$")


@contextmanager
def hub_server(datasets):
    """Serves `{"owner/name": {"main": {path: bytes}, "refs/convert/parquet": {...}, "card": {...}}}` at an address."""

    def files_of(name, revision):
        return datasets.get(name, {}).get({SHA: "main", CONVERTED_SHA: "refs/convert/parquet"}.get(revision, revision))

    class Hub(Handler):
        def missing(self, what):
            self.answer(404, b"{}", [("X-Error-Code", what)])

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            if match := _API.match(path.replace("refs/convert/parquet", "refs%convert%parquet")):
                return self.describe(match[1], match[2], (match[3] or "main").replace("%", "/"), match[4] or "")
            if match := _FILE.match(path):
                files = files_of(match[1], match[2]) or {}
                return self.content(files[match[3]], match[2]) if match[3] in files else self.missing("EntryNotFound")
            return self.missing("RepoNotFound")

        do_HEAD = do_GET

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            match = _API.match(unquote(urlsplit(self.path).path))
            files = files_of(match[1], match[3]) or {}
            paths = parse_qs(body).get("paths") or json.loads(body if body.startswith("{") else "{}").get("paths", [])
            self.answer(200, [self.entry(name, files[name]) for name in paths if name in files])

        def entry(self, name, data):
            return {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}

        def describe(self, name, what, revision, folder):
            files = files_of(name, revision)
            if name not in datasets:
                return self.missing("RepoNotFound")
            if files is None:
                return self.missing("RevisionNotFound")
            if what == "tree":
                value = [self.entry(path, data) for path, data in files.items() if path.startswith(folder)]
            else:
                siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
                sha = CONVERTED_SHA if "convert" in revision or revision == CONVERTED_SHA else SHA
                value = {"id": name, "sha": sha, "siblings": siblings, "tags": [], "private": False, "disabled": False}
                value |= {"cardData": datasets[name].get("card", {}), "downloads": 0, "likes": 0}
            return self.answer(200, value)

        def content(self, data, commit):
            headers = [("ETag", '"x"'), ("X-Repo-Commit", commit), ("Accept-Ranges", "bytes")]
            part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if part is None:
                return self.answer(200, data, headers)
            start, stop = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
            where = f"bytes {start}-{stop}/{len(data)}"
            return self.answer(206, data[start : stop + 1], [*headers, ("Content-Range", where)])

    with serving(Hub) as host:
        yield f"http://{host}"
