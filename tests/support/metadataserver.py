"""The metadata servers of AWS (IMDSv2) and GCP over real HTTP on this machine."""

from contextlib import contextmanager

from serving import Handler, serving


class Clouds:
    def __init__(self):
        self.action = None  # body of AWS's answer; None: 404, as while no notice exists
        self.preempted = b"FALSE"  # body of GCP's answer
        self.once = False  # withdraw a notice after one host has read it
        self.tokens = 0  # number of tokens given out
        self.token = None  # body of the answer with a token, in place of a valid one
        self.asked = []  # paths


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
