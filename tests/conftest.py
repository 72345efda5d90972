"""Settings that every test needs before Ray is imported, and what several folders of tests share."""

import gc
import logging
import os
import sys
import threading
import time
from unittest.mock import patch

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a local session would otherwise write a token to the home folder
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: Triton runs it without a GPU
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # `precision: auto` is float32 on every machine
if "PYTEST_XDIST_WORKER" in os.environ:  # two processes of tests on two cores: threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Threads of Ray Data, which end some time after their reader has left them. One that uses Ray, if only to let go of an
# object, after the session has ended ends the process.
_DATA_THREADS = ("StreamingExecutor", "Prefetcher", "iter_threaded", "map_tp_")
_SESSION_FILES = set()


@pytest.fixture(scope="module")
def session():
    """A local Ray session: all files of a process that use it share it, unless a test ends it."""
    from s3server import CREDENTIALS

    from declutr.common.session import start_ray

    with patch.dict(os.environ, CREDENTIALS):  # which workers read from their environment
        start_ray(num_cpus=6)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Puts files that use the session first, then other long ones: no process ends with the longest of them."""
    for item in items:  # whose shards are prepared with Ray
        if "data" in item.fixturenames and item.path.parent.name == "integration":
            item.add_marker("ray")
    yield  # takes out what markers leave out
    _SESSION_FILES.update(item.path for item in items if "session" in item.fixturenames)
    long = {item.path for item in items if item.get_closest_marker("ray") or item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in _SESSION_FILES, item.path not in long))


def pytest_runtest_teardown(item, nextitem):
    """Ends the session behind the last file of this process that uses it."""
    if item.path in _SESSION_FILES and (nextitem is None or nextitem.path not in _SESSION_FILES):
        import ray

        gc.collect()  # streams that a test has left
        deadline = time.monotonic() + 15
        for thread in threading.enumerate():
            if thread.name.startswith(_DATA_THREADS):
                thread.join(max(0, deadline - time.monotonic()))
        ray.shutdown()


@pytest.fixture(autouse=True)
def _threads_stay():
    """Fails the test that leaves another number of threads: later tests in this process would compute other bits."""
    torch = sys.modules.get("torch")
    threads = torch and torch.get_num_threads()
    yield
    assert torch is None or torch.get_num_threads() == threads


@pytest.fixture
def one_thread():
    """Many small steps are fastest with one: on a busy machine threads wait for each other at every step."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def log():
    """Messages of the project's logger in this process."""
    lines, handler, logger = [], logging.Handler(), logging.getLogger("declutr")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("DEBUG")
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)
