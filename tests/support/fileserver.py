"""A file server over real HTTP on this machine that can break off."""

from contextlib import contextmanager
from types import SimpleNamespace

from serving import Handler, serving


@contextmanager
def file_server(files):
    """Serves `files` by path, which may change meanwhile; the next connections break after `break_after` bytes."""
    served = SimpleNamespace(files=dict(files), break_after=[], requests=[])

    class Files(Handler):
        def do_GET(self):
            path = self.path.lstrip("/")
            served.requests.append(path)
            content = served.files.get(path)
            if content is None:
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if served.break_after:
                content, self.close_connection = content[: served.break_after.pop(0)], True
            return self.wfile.write(content)

    with serving(Files) as host:
        served.address = f"http://{host}"
        yield served
