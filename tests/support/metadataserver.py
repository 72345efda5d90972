"""The metadata servers of AWS (IMDSv2) and GCP over real HTTP on this machine."""

from contextlib import contextmanager
from types import SimpleNamespace

from serving import Handler, serving


@contextmanager
def metadata_server():
    """Yields AWS's `action` (None: 404), GCP's `preempted`, `once` for a notice to a single host, a bad `token`."""
    clouds = SimpleNamespace(action=None, preempted=b"FALSE", once=False, tokens=0, token=None, asked=[])

    class Metadata(Handler):
        def do_PUT(self):
            lifetime = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0"))
            if self.path != "/latest/api/token" or not 1 <= lifetime <= 21600:
                return self.answer(400)
            clouds.tokens += 1
            return self.answer(200, clouds.token or f"token-{clouds.tokens}".encode())

        def do_GET(self):
            clouds.asked.append(self.path)
            if self.path == "/computeMetadata/v1/instance/preempted":
                google = self.headers.get("Metadata-Flavor") == "Google"
                return self.answer(200, clouds.preempted) if google else self.answer(403)
            tokens = [f"token-{number}" for number in range(1, clouds.tokens + 1)]
            if self.headers.get("X-aws-ec2-metadata-token") not in tokens:
                return self.answer(401)
            if self.path != "/latest/meta-data/spot/instance-action" or clouds.action is None:
                return self.answer(404, b"<?xml version='1.0'?><html/>")
            body, clouds.action = clouds.action, None if clouds.once else clouds.action
            return self.answer(200, body)

    with serving(Metadata) as clouds.host:
        yield clouds
