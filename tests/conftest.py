"""Settings that every test needs before Ray is imported, and what several folders of tests share."""

import gc
import logging
import os
import threading

import pytest

os.environ["RAY_AUTH_MODE"] = "disabled"  # a local session would otherwise write a token to the home folder
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: Triton runs it without a GPU
if "PYTEST_XDIST_WORKER" in os.environ:  # two processes of tests on two cores: threads would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SESSION_CPUS = 6
# Threads of Ray Data, which end some time after their reader has left them. One that uses Ray, if only to let go of an
# object, after the session has ended ends the process.
_DATA_THREADS = ("StreamingExecutor", "Prefetcher", "iter_threaded", "map_tp_")


@pytest.fixture(scope="module")
def session():
    """A local Ray session. Tests that follow each other share it, also those of several files."""
    from declutr.common.session import start_ray

    start_ray(num_cpus=SESSION_CPUS)


def pytest_collection_modifyitems(items):
    """Puts files with Ray or slow tests first: they share a session, and no process ends with the longest of them.

    Shards for tests are prepared with Ray, so that tests that read them are marked too.
    """
    for item in items:
        if "data" in item.fixturenames and item.path.parent.name == "integration":
            item.add_marker("ray")
    long = {item.path for item in items if item.get_closest_marker("ray") or item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_runtest_teardown(item, nextitem):
    """Ends the shared session before the first test that does not ask for it."""
    if "session" in item.fixturenames and (nextitem is None or "session" not in nextitem.fixturenames):
        import ray

        gc.collect()  # streams that a test has left
        for thread in threading.enumerate():
            if thread.name.startswith(_DATA_THREADS):
                thread.join(5)
        ray.shutdown()


@pytest.fixture
def log():
    """Messages of the project's logger in this process."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("declutr")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel("DEBUG")
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)
