"""A Ray cluster and an S3 server on hosts in namespaces, which share no folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prepare.lab import Host, Lab

ROOT = Path(__file__).resolve().parents[2]
_NET = "10.78.0"
STORE = f"{_NET}.200"
ENDPOINT = f"endpoint_override=http://{STORE}:5000"
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "src"),
    "PYTHONWARNINGS": "ignore",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # As in cluster.yaml: a lost host is noticed after 12 seconds.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}


def serve(lab: Lab, corpus: Path) -> Host:
    """Start the S3 server, and send the corpus to it."""
    store = lab.add("store", STORE)
    subprocess.Popen(
        store.command("moto_server", "-H", STORE, "-p", "5000"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    script = (
        "import sys, time, pyarrow.fs\n"
        "for _ in range(300):\n"
        "    try:\n"
        f"        store, _ = pyarrow.fs.FileSystem.from_uri('s3://bucket?{ENDPOINT}&allow_bucket_creation=true')\n"
        "        store.create_dir('bucket')\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.2)\n"
        "from declutr.common.stores.copies import main\n"
        f"sys.exit(main(['{corpus}', 's3://bucket/corpus?{ENDPOINT}']))\n"
    )
    check(store.run(sys.executable, "-c", script, env=ENVIRONMENT))
    return store


@contextmanager
def cluster(lab: Lab, name: str, number: int) -> Iterator[list[Host]]:
    """A Ray cluster of new hosts with one CPU for tasks each; the first is the head."""
    hosts = [lab.add(f"{name}h{index}", f"{_NET}.{10 * number + index}") for index in range(number)]
    try:
        for index, host in enumerate(hosts):
            place = ["--head", "--port=6379"] if index == 0 else [f"--address={hosts[0].address}:6379"]
            size = ["--num-cpus=1", f"--object-store-memory={100 * 2**20}", f"--node-ip-address={host.address}"]
            check(host.run("ray", "start", *place, *size, "--disable-usage-stats", env=ENVIRONMENT))
        yield hosts
    finally:
        for host in hosts:
            if lab.hosts.pop(host.name, None):
                host.kill()


def sent(lab: Lab) -> Any:
    """Bytes sent by the store, sent to the store, and sent by all other hosts to any place, so far."""
    lines = Path(f"/proc/{lab.pid}/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    counts = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
    by_hosts = sum(int(fields[0]) for name, fields in counts.items() if name.startswith("v-m"))
    return np.array([int(counts["v-store"][0]), int(counts["v-store"][8]), by_hosts], np.float64)


def check(done: subprocess.CompletedProcess[Any]) -> None:
    """Raise RuntimeError with the output of a command that failed."""
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode} of {done.args}: {done.stdout}")
