"""Processes of Python that see this project's packages and the helpers of its tests; waiting with a deadline."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{ROOT / 'src'}{os.pathsep}{Path(__file__).parent}"


def environment(**changes):
    """That of this process with both on the path and with these variables; None takes one away."""
    whole = os.environ | {"PYTHONPATH": PATH} | changes
    return {name: value for name, value in whole.items() if value is not None}


def run_python(*words, folder=ROOT, check=True, env=None, **options):
    """Runs Python with these words in a folder to its end, as a rule a good one; its output is text."""
    command, env = [sys.executable, *map(str, words)], environment(**(env or {}))
    done = subprocess.run(command, **{"cwd": folder, "env": env, "capture_output": True, "text": True} | options)
    assert not check or done.returncode == 0, done.stderr
    return done


def until(condition, what="the condition", seconds=60):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)
    return value
