"""Kills at random points, of workers and of the driver: shards as of the run that nobody disturbed.

DECLUTR_KILLS=20 for many of them; the figure in docs/evidence/reliability.md is from such a run.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from preparing import checksums
from processes import ROOT, environment

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare

KILLS = int(os.environ.get("DECLUTR_KILLS", "3"))
DRIVER_KILLS = max(1, KILLS // 4)
WORKER_KILLS = KILLS - DRIVER_KILLS
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """About 5 MB, every tenth document a copy, every thirtieth a near copy of the one before."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    texts: list[str] = []
    for number in range(1600):
        if number % 10 == 9:
            texts.append(texts[-5])
        elif number % 30 == 18:
            changed = texts[-1].split()
            changed[:: len(changed) // 5] = ["changed"] * len(changed[:: len(changed) // 5])
            texts.append(" ".join(changed))
        else:
            texts.append(" ".join(draw.choices(words, k=draw.randint(100, 900))))
    for index in range(4):
        lines = [json.dumps({"text": text}) for text in texts[index::4]]
        (folder / f"{index}.jsonl").write_text("\n".join(lines))
    return folder


def values_of(corpus: Path, output: Path) -> dict:
    return {
        "output": str(output),
        "corpus": {"kind": "files", "paths": [str(corpus)]},
        "tokenizer": {"kind": "train", "vocab_size": 2000, "sample_mib": 0.2},
        "geometry": {"num_anchors": 1, "max_tokens": 64},
        "duplicates": {"near": {}},
        "write_rejected": True,
        "unit_mib": 0.15,
    }


def start(folder: Path, corpus: Path, num_cpus: int) -> subprocess.Popen:
    """The command, in a process of its own."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"prepare": values_of(corpus, folder / "out")}))
    arguments = [sys.executable, str(ROOT / "pipeline" / "prepare.py"), str(path), f"session.num_cpus={num_cpus}"]
    return subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def undisturbed(session, corpus, tmp_path_factory):  # noqa: ARG001 - Ray for preparation
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    manifest = prepare(PipelineConfig.model_validate(values_of(corpus, folder)))
    assert len(manifest.ledgers) > 20
    assert {"duplicate", "near_duplicate"} <= manifest.dropped.keys()
    return checksums(folder)


def busy_workers(driver: int) -> list[int]:
    """Processes below this one that run one of our tasks."""
    with contextlib.suppress(psutil.NoSuchProcess):  # the driver has ended
        below = psutil.Process(driver).children(recursive=True)
        return [process.pid for process in below if title_of(process).startswith("ray::Map")]
    return []


def title_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "".join(process.cmdline()[:1])
    return ""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kills_change_nothing_whatever_the_number_of_workers(corpus, tmp_path, undisturbed):
    """Workers die, then the command; the same command continues with another number of workers."""
    draw = random.Random(1)
    kills = 0
    for number in range(DRIVER_KILLS + 1):
        driver = start(tmp_path, corpus, num_cpus=(2, 4, 1)[number % 3])
        enough = WORKER_KILLS * (number + 1) // (DRIVER_KILLS + 1)
        last = number == DRIVER_KILLS
        deadline = time.monotonic() + 300
        while driver.poll() is None:
            assert time.monotonic() < deadline
            if busy := busy_workers(driver.pid):
                time.sleep(draw.uniform(0, 0.3))
                if kills < enough:
                    with contextlib.suppress(ProcessLookupError):  # it may have ended while we waited
                        os.kill(draw.choice(busy), signal.SIGKILL)
                        kills += 1
                elif not last:
                    driver.kill()
            time.sleep(0.01)
        if last:
            assert driver.returncode == 0
        else:
            assert driver.returncode == -signal.SIGKILL, "finished before it could be killed"
            assert not (tmp_path / "out" / "manifest.json").exists()
    assert kills == WORKER_KILLS
    assert checksums(tmp_path / "out") == undisturbed
