"""Waiting for a condition with a deadline."""

import time


def until(condition, what="the condition", seconds=60):
    """Waits until the condition holds; returns its value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.01)
    return found
