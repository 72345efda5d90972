"""Preparation into an object store on 1, 2 and 3 hosts that share no folder: seconds, bytes exchanged, kills.

    python -m benchmarks.prepare.hosts --json OUT [--hosts 1 2 3] [--documents 4000] [--kills 20] [--near]

Hosts are namespaces of this machine (benchmarks/prepare/lab.py; root), with one CPU for tasks each. The S3 server
(moto) runs on a host that is not in the cluster, and the corpus is in it. Every output is compared, byte for byte, with
a folder that one machine makes from the same corpus. With `--kills`, a host is killed in a further run on three hosts,
then tasks and commands at random; a killed command is repeated.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.prepare.cluster import ENDPOINT, ENVIRONMENT, ROOT, check, cluster, sent, serve
from benchmarks.prepare.lab import Host, Lab, missing
from declutr.common.storage import hash_file, write_json

_STARTS = 120
"""Most commands of a run with kills."""


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    given = options().parse_args(arguments)
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        figures = measure(given, Path(folder))
    record.publish(figures | record.facts("prepare.hosts", given.commit), given.json)


def options() -> argparse.ArgumentParser:
    """Make the parser."""
    made = record.parser("prepare.hosts", __doc__)
    made.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 3], help="numbers of hosts to measure")
    made.add_argument("--documents", type=int, default=4000)
    made.add_argument("--unit-mib", type=float, default=0.5, help="text of a unit")
    made.add_argument("--near", action="store_true", help="also remove near-duplicates")
    made.add_argument("--kills", type=int, default=0, help="kill a host, and this many tasks and commands")
    return made


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure all figures, and compare every output with that of one machine.

    Raises:
        RuntimeError: an output differs, or a command fails.
    """
    corpus = write_corpus(work / "corpus", given.documents, given.seed)
    runs = []
    with Lab(work / "lab", [ROOT, work]) as lab:
        store = serve(lab, corpus)
        began = time.perf_counter()
        line = _command(_config(given, work, str(work / "alone"), {"num_cpus": 1}))
        check(store.run(*line, env=ENVIRONMENT, folder=ROOT))
        alone = {"seconds": round(time.perf_counter() - began, 1), "cpus": 1}
        wanted = contents(work / "alone")
        for number in given.hosts:
            with cluster(lab, f"m{number}", number) as hosts:
                found = _timed(given, work, lab, hosts)
            _compare(store, work, found["name"], wanted)
            record.progress(json.dumps(found))
            runs.append(found)
        killed = _with_kills(given, work, lab, store, wanted) if given.kills else None
    return {
        "benchmark": "prepare_hosts",
        "text_mib": round(sum(path.stat().st_size for path in corpus.iterdir()) / 2**20, 1),
        "output_mib": round(sum(path.stat().st_size for path in (work / "alone").rglob("*")) / 2**20, 1),
        "one_machine": alone,
        "hosts": runs,
        "kills": killed,
        "bytes_equal": True,
        "load": os.getloadavg()[0],
    }


def write_corpus(folder: Path, documents: int, seed: int) -> Path:
    """Write JSON lines, every tenth document a copy, every thirtieth a near copy."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    texts: list[str] = []
    for number in range(documents):
        text = " ".join(draw.choices(words, k=draw.randint(200, 1800)))
        if number % 10 == 9:
            text = texts[-5]
        elif number % 30 == 18:
            changed = texts[-1].split()
            changed[:: len(changed) // 5] = ["changed"] * len(changed[:: len(changed) // 5])
            text = " ".join(changed)
        texts.append(text)
    folder.mkdir()
    for index in range(4):
        lines = [json.dumps({"text": text}) for text in texts[index::4]]
        (folder / f"{index}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _config(given: argparse.Namespace, work: Path, output: str, session: dict[str, int]) -> Path:
    """Write a configuration; its settings are the same on any hosts."""
    values = {
        "output": output,
        "corpus": {"kind": "files", "paths": [f"s3://bucket/corpus?{ENDPOINT}"]},
        "tokenizer": {"kind": "train", "vocab_size": 4000, "sample_mib": 1.0},
        "geometry": {"num_anchors": 1, "max_tokens": 64},
        "duplicates": {"near": {}} if given.near else {},
        "write_rejected": True,
        "unit_mib": given.unit_mib,
        "session": session,
    }
    path = work / f"{len(list(work.glob('*.json')))}.json"
    write_json(path, {"prepare": values})
    return path


def _command(config: Path) -> list[str]:
    return [sys.executable, "-m", "declutr.pipeline.prepare", str(config)]


def _timed(given: argparse.Namespace, work: Path, lab: Lab, hosts: list[Host]) -> dict[str, Any]:
    """Run the command once; return its seconds and the bytes that hosts and store have exchanged."""
    name = f"out-{len(hosts)}"
    config = _config(given, work, f"s3://bucket/{name}?{ENDPOINT}", {})
    before, began = sent(lab), time.perf_counter()
    check(hosts[0].run(*_command(config), env=ENVIRONMENT, folder=ROOT))
    seconds, exchanged = time.perf_counter() - began, sent(lab) - before
    mib = np.round(exchanged / 2**20, 1).tolist()
    return {
        "name": name,
        "hosts": len(hosts),
        "seconds": round(seconds, 1),
        "mib_to_store": mib[1],
        "mib_from_store": mib[0],
        "mib_between_hosts": round(mib[2] - mib[1], 1),
    }


def contents(folder: Path) -> dict[str, str]:
    """Checksums of an output, without the log of its times."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "progress.jsonl"]
    return {path.relative_to(folder).as_posix(): hash_file(path) for path in files}


def _compare(store: Host, work: Path, name: str, wanted: dict[str, str]) -> None:
    """Fetch an output and compare it with that of one machine.

    Raises:
        RuntimeError: a file differs.
    """
    pulled = work / name
    line = [
        sys.executable,
        "-m",
        "declutr.common.stores.copies",
        f"s3://bucket/{name}?{ENDPOINT}",
        str(pulled),
    ]
    check(store.run(*line, env=ENVIRONMENT, folder=ROOT))
    found = contents(pulled)
    if found != wanted:
        names = sorted(one for one in found.keys() | wanted.keys() if found.get(one) != wanted.get(one))
        raise RuntimeError(f"{name} differs from the output of one machine: {names}")


def _with_kills(given: argparse.Namespace, work: Path, lab: Lab, store: Host, wanted: dict[str, str]) -> dict[str, Any]:
    """Kill a host of three during the work, then tasks and commands at random; repeat the command until it succeeds."""
    draw = random.Random(given.seed)
    config = _config(given, work, f"s3://bucket/killed?{ENDPOINT}", {})
    done = {"host": 0, "task": 0, "command": 0}
    with cluster(lab, "k", 3) as hosts:
        for start in range(_STARTS):
            driver = subprocess.Popen(
                hosts[0].command(*_command(config), env=ENVIRONMENT, folder=ROOT),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            while driver.poll() is None:
                time.sleep(draw.uniform(0.1, 0.6) if done["host"] else 0.1)
                tasks = [(host, pid) for host in hosts for pid in _tasks(host)]
                if not done["host"]:
                    if any(host is hosts[-1] for host, _ in tasks):
                        lab.hosts.pop(hosts.pop().name).kill()
                        done["host"] = 1
                elif not tasks or done["task"] + done["command"] >= given.kills:
                    continue
                elif draw.random() < 0.3:
                    hosts[0].run("pkill", "-KILL", "-f", "declutr.pipeline.prepare")
                    done["command"] += 1
                else:
                    host, pid = draw.choice(tasks)
                    host.run("kill", "-KILL", str(pid))
                    done["task"] += 1
            output = driver.communicate()[0]
            if driver.returncode == 0:
                break
            record.progress(f"start {start}: exit status {driver.returncode}, {done}; {output.strip()[-300:]}")
        else:
            raise RuntimeError(f"not finished after {_STARTS} starts: {output}")
    _compare(store, work, "killed", wanted)
    return done | {"starts": start + 1, "bytes_equal": True}


def _tasks(host: Host) -> list[int]:
    """Process ids, on a host, of the processes that run our tasks."""
    shown = host.run("ps", "-axww", "-o", "pid=,command=").stdout.splitlines()
    return [int(line.split()[0]) for line in shown if "ray::Map" in line]


if __name__ == "__main__":
    main()
