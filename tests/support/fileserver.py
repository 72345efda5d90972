"""A file server over real HTTP on this machine that can break off."""

from contextlib import contextmanager

from serving import Handler, serving


class Served:
    """What is served and what was asked for.

    Attributes:
        files: content by path (without the leading slash); may be changed while the server runs.
        break_after: connections still to be broken, with the number of bytes each gets.
        requests: the path of every request.
    """

    def __init__(self, files):
        self.files = dict(files)
        self.break_after = []
        self.requests = []
        self.address = ""


@contextmanager
def file_server(files):
    served = Served(files)

    class Files(Handler):
        def do_GET(self):
            path = self.path.lstrip("/")
            served.requests.append(path)
            content = served.files.get(path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if served.break_after:
                content, self.close_connection = content[: served.break_after.pop(0)], True
            self.wfile.write(content)

    with serving(Files) as host:
        served.address = f"http://{host}"
        yield served
