"""The metadata servers of AWS (IMDSv2) and GCP over real HTTP on this machine."""

from contextlib import contextmanager

from serving import Handler, serving


class Clouds:
    """What the servers say.

    Attributes:
        action: body of AWS's answer; None: 404, as while no notice exists.
        preempted: body of GCP's answer.
        once: withdraw a notice after one host has read it.
        tokens: number of tokens given out.
        token: body of the answer with a token, in place of a valid one.
        asked: paths that were asked for.
        host: address of the server.
    """

    def __init__(self):
        self.action = None
        self.preempted = b"FALSE"
        self.once = False
        self.tokens = 0
        self.token = None
        self.asked = []
        self.host = ""


@contextmanager
def metadata_server():
    clouds = Clouds()

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
                return self.answer(200, clouds.preempted) if self.google() else self.answer(403)
            tokens = [f"token-{number}" for number in range(1, clouds.tokens + 1)]
            if self.headers.get("X-aws-ec2-metadata-token") not in tokens:
                return self.answer(401)
            if self.path != "/latest/meta-data/spot/instance-action" or clouds.action is None:
                return self.answer(404, b"<?xml version='1.0'?><html/>")
            body = clouds.action
            if clouds.once:
                clouds.action = None
            return self.answer(200, body)

        def google(self):
            return self.headers.get("Metadata-Flavor") == "Google"

    with serving(Metadata) as clouds.host:
        yield clouds
