"""One rule for all numbers of a configuration: finite, within bounds that every computation holds, and no yes or no."""

import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from declutr.common.suggestions import below, kinds_of

MAX_NUMBER = 10**12
"""Largest magnitude of a number."""
MIN_NUMBER = 1e-37
"""Smallest magnitude of a number that is not 0; smaller ones are 0 in single precision."""
MAX_SEED = 2**63 - 1
"""Largest seed."""
_SHOWN_CHARACTERS = 40


def number_problems(values: Any, model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Problems of the numbers in a tree of settings, one line each, which starts with key and value.

    Validation alone takes yes and no for 1 and 0, and any magnitude.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            yield from number_problems(value, model, (*path, str(key)))
        return
    if isinstance(values, list):
        for number, value in enumerate(values):
            yield from number_problems(value, model, (*path, str(number)))
        return
    if (problem := _problem(values, model, path)) is not None:
        shown = repr(values) if len(repr(values)) <= _SHOWN_CHARACTERS else f"{repr(values)[:_SHOWN_CHARACTERS]}..."
        yield f"{'.'.join(path)} = {shown}: {problem}"


def _problem(value: Any, model: type[BaseModel], path: tuple[str, ...]) -> str | None:
    """The problem of one value."""
    if isinstance(value, (bool, str)):
        kinds = set(_kinds(model, path))
        if not kinds & {int, float} or kinds & ({bool} if isinstance(value, bool) else {str}):
            return None
        if isinstance(value, bool):
            return "a number is needed (YAML takes yes, no, on, off for true and false)"
        try:
            value = float(value)  # as validation reads 1e308, which is a text in YAML 1.1
        except ValueError:
            return None
    if not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    limit = MAX_SEED if path[-1] == "seed" else MAX_NUMBER
    if abs(value) > limit:
        return f"must be at most {limit:,}" if value > 0 else f"must be at least -{limit:,}"
    if 0 < abs(value) < MIN_NUMBER:
        return f"must be 0 or at least {MIN_NUMBER:g}, because it is 0 in single precision"
    return None


def _kinds(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[Any]:
    """The types that a key may hold; an entry of a list has those of the list."""
    while path and path[-1].isdigit():
        path = path[:-1]
    for section in below((model,), path[:-1]):
        if path[-1] in section.model_fields:
            yield from kinds_of(section.model_fields[path[-1]].annotation)
