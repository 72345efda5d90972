"""Kills at random points, of workers and of the driver: shards as of the run that nobody disturbed.

DECLUTR_KILLS=20 for many of them; the figure in docs/evidence/reliability.md is from such a run.
"""

import contextlib
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
import tinyruns as runs
from preparing import checksums, config_of, write_jsonl
from processes import ROOT, environment

from declutr.pipeline.prepare import prepare

KILLS = int(os.environ.get("DECLUTR_KILLS", "3"))
DRIVER_KILLS = max(1, KILLS // 4)
WORKER_KILLS = KILLS - DRIVER_KILLS
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture
def corpus(tmp_path):
    """About 5 MB, every tenth document a copy, every thirtieth a near copy of the one before."""
    draw, texts = random.Random(0), list[str]()
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(5000)]
    for number in range(1600):
        if number % 10 == 9:
            texts.append(texts[-5])
        elif number % 30 == 18:
            changed = texts[-1].split()
            texts.append(" ".join("changed" if i % (len(changed) // 5) == 0 else w for i, w in enumerate(changed)))
        else:
            texts.append(" ".join(draw.choices(words, k=draw.randint(100, 900))))
    (tmp_path / "in").mkdir()
    for index in range(4):
        write_jsonl(tmp_path / "in" / f"{index}.jsonl", *({"text": text} for text in texts[index::4]))
    return tmp_path / "in"


def busy_workers(driver: int) -> list[psutil.Process]:
    """Processes below this one that run one of our tasks."""
    busy = list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):  # the driver, or a worker, has ended
        below = psutil.Process(driver).children(recursive=True)
        busy.extend(process for process in below if "".join(process.cmdline()[:1]).startswith("ray::Map"))
    return busy


@pytest.mark.usefixtures("session")
def test_kills_change_nothing_whatever_the_number_of_workers(corpus, tmp_path):
    """Workers die, then the command; the same command continues with another number of workers."""
    settings = {"duplicates": {"near": {}}, "write_rejected": True, "unit_mib": 0.15}
    manifest = prepare(config_of(corpus, tmp_path / "undisturbed", **settings))
    assert len(manifest.ledgers) > 20
    assert {"duplicate", "near_duplicate"} <= manifest.dropped.keys()
    values = config_of(corpus, tmp_path / "out", **settings).model_dump(mode="json")
    path = runs.write_config(tmp_path / "config.yaml", prepare=values)
    command = [sys.executable, str(ROOT / "pipeline" / "prepare.py"), str(path)]
    draw, kills = random.Random(1), 0
    for number in range(DRIVER_KILLS + 1):
        driver = subprocess.Popen(
            [*command, f"session.num_cpus={(2, 4, 1)[number % 3]}"],
            env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        enough = WORKER_KILLS * (number + 1) // (DRIVER_KILLS + 1)
        last, deadline = number == DRIVER_KILLS, time.monotonic() + 300
        while driver.poll() is None:
            assert time.monotonic() < deadline
            if busy := busy_workers(driver.pid):
                time.sleep(draw.uniform(0, 0.3))
                if kills < enough:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended while we waited
                        draw.choice(busy).kill()
                        kills += 1
                elif not last:
                    driver.kill()
            time.sleep(0.01)
        assert driver.returncode == (0 if last else -9), "finished before it could be killed"
        assert (tmp_path / "out" / "manifest.json").exists() is last
    assert kills == WORKER_KILLS
    assert checksums(tmp_path / "out") == checksums(tmp_path / "undisturbed")
