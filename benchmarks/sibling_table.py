"""Tables of the figures of `benchmarks.siblings`."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.sibling_runs import PAIRS

_COLUMNS = {"stsb_dev": "STS-B dev", "recall_at_1": "recall@1, %", "alignment": "alignment", "uniformity": "uniformity"}


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    """Markdown tables: scores by method with mean and spread over the seeds, and differences seed by seed."""
    runs, start = figures["runs"], figures["start"]
    yield f"| after {figures['steps']} steps | {' | '.join(_COLUMNS.values())} |"
    yield "| --- | " + " | ".join(["---:"] * len(_COLUMNS)) + " |"
    yield f"| start: {start['name']} | " + " | ".join(_cell(name, [start["scores"]]) for name in _COLUMNS) + " |"
    methods: dict[str, list[Mapping[str, Any]]] = {one["method"]: [] for one in runs}
    for one in runs:
        methods[one["method"]].append(one)
    for method, found in methods.items():
        yield f"| {method} | " + " | ".join(_cell(name, found) for name in _COLUMNS) + " |"
    names = ("stsb_dev", "recall_at_1")
    pairs = [(one, other) for one, other in PAIRS if {one, other} <= methods.keys()]
    if not pairs:
        return
    yield ""
    yield f"| difference, seed by seed | {' | '.join(_COLUMNS[name] for name in names)} |"
    yield "| --- | " + " | ".join(["---:"] * len(names)) + " |"
    for one, other in pairs:
        both = [{name: left[name] - right[name] for name in names} for left, right in _paired(methods, one, other)]
        yield f"| {one} over {other} | " + " | ".join(_cell(name, both, sign="+") for name in names) + " |"


def _paired(
    methods: Mapping[str, Sequence[Mapping[str, Any]]], one: str, other: str
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Runs of two methods with the same seed."""
    by_seed = {run["seed"]: run for run in methods[other]}
    return ((run, by_seed[run["seed"]]) for run in methods[one] if run["seed"] in by_seed)


def _cell(name: str, scores: Sequence[Mapping[str, float]], sign: str = "") -> str:
    """Mean and standard deviation (n - 1) of a score."""
    values = [one[name] * (100 if name == "recall_at_1" else 1) for one in scores]
    digits = f"{sign}.1f" if name in ("stsb_dev", "recall_at_1") else ".3f"
    mean = format(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), digits.lstrip('+'))}"
