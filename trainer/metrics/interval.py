"""Intervals of a run: a number of steps, or a share of all steps."""

import contextlib
import math
from typing import Annotated, Any

from pydantic import BeforeValidator


def _read(value: Any) -> Any:
    """A number of steps as an integer, a share as a float below 1.

    Raises:
        ValueError: it is neither, or 1.0, which could be both.
    """
    if isinstance(value, str):  # YAML reads 1e-3 as a text
        with contextlib.suppress(ValueError):
            value = int(value) if value.isdigit() else float(value)
    if isinstance(value, float) and value == 1:
        raise ValueError(
            "may mean every step or the whole run; write 1 for every step, or a share below 1, such as 0.5"
        )
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not number or (value > 1 and value != int(value)):
        raise ValueError(
            "must be a number of steps, such as 200, or a share of the run's steps below 1, such as 0.05 (20 times)"
        )
    return int(value) if value == 0 or value >= 1 else value


Interval = Annotated[int | float, BeforeValidator(_read)]
"""A number of steps (an integer), or a share of the run's steps (above 0 and below 1)."""


def steps_between(interval: float, total_steps: int) -> int:
    """An interval as a number of steps, for a run of `total_steps`; a share is rounded up to whole steps. 0 is 0."""
    return int(interval) if interval == 0 or interval >= 1 else max(1, math.ceil(total_steps * interval - 1e-9))
