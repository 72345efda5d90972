"""Results of an item as `results.json`, `results.md` and a chart: our numbers, the paper's, and the differences."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from declutr.common.storage import write_json, write_text
from declutr.evaluation.report.charts import Bar, Bars
from declutr.reproduction.comparison import LabelComparison, compare_labels
from declutr.reproduction.plan import ItemPlan
from declutr.reproduction.provenance import facts

RESULTS = "results"


def write_results(plan: ItemPlan, command: Sequence[str]) -> str:
    """Writes all files from the runs that have finished; returns the Markdown.

    Args:
        plan: the item.
        command: arguments of the command.
    """
    cells = list({run.cell.name: run.cell for run in plan.runs}.values())
    numbers: dict[str, dict[str, dict[int, float]]] = {name: {} for name in plan.columns}
    seconds: dict[str, dict[int, float]] = {}
    seeds, marks = sorted({run.seed for run in plan.runs}), set[str]()
    for run in plan.runs:
        if found := plan.finished(run):
            marks |= {*found["marks"]}
            seconds.setdefault(run.cell.name, {})[run.seed] = found["seconds"]
            for name, value in found["scores"].items():
                scored = [run.seed] if run.config else seeds  # its numbers stand beside those of every seed
                numbers[name].setdefault(run.cell.name, {}).update(dict.fromkeys(scored, value))
    trained, pairs = bool(plan.item.axes), plan.item.pairs
    compared = {name: compare_labels(cells, found, pairs) if trained else [] for name, found in numbers.items()}
    made = facts(["declutr reproduce", *command])
    finished = sum(map(len, seconds.values()))
    names = [cell.name for cell in cells]
    text = "\n".join(_markdown(plan, names, numbers, compared, sorted(marks), made, finished)) + "\n"
    write_json(
        plan.folder / f"{RESULTS}.json",
        {
            "item": plan.name,
            "scale": plan.scale,
            "source": plan.item.source,
            "finished_runs": finished,
            "planned_runs": len(plan.runs),
            "numbers": numbers,
            "printed": plan.item.printed,
            "differences": {name: [one.to_json() for one in found] for name, found in compared.items()},
            "seconds": seconds,
            "not_published_data": sorted(marks),
            "settings": plan.settings.model_dump(mode="json"),
            **made,
        },
    )
    write_text(plan.folder / f"{RESULTS}.md", text)
    _draw(plan, names, numbers)
    return text


def _markdown(
    plan: ItemPlan,
    cells: Sequence[str],
    numbers: Mapping[str, Mapping[str, Mapping[int, float]]],
    compared: Mapping[str, Sequence[LabelComparison]],
    marks: Sequence[str],
    made: Mapping[str, Any],
    finished: int,
) -> Iterator[str]:
    item, printed = plan.item, plan.item.printed
    yield f"# {item.title}"
    yield ""
    yield f"*Paper:* {item.source}. {item.says}"
    yield ""
    yield f"Scale {plan.scale}: {finished} of {len(plan.runs)} runs. Mean ± standard deviation over seeds; the paper's"
    yield "number in parentheses."
    yield ""
    yield f"| run | {' | '.join(plan.columns)} |"
    yield "| --- | " + " | ".join(["---:"] * len(plan.columns)) + " |"
    for name in cells:
        shown = (_cell(found.get(name, {}), printed.get(name, {}).get(column)) for column, found in numbers.items())
        yield f"| {name} | {' | '.join(shown)} |"
    for column, differences in compared.items():
        if differences:
            yield ""
            yield from _differences(column, differences)
    pairings = [one.pairing for found in compared.values() for one in found if one.pairing is not None]
    if pairings:
        yield ""
        yield (
            "Runs that share a seed share documents, spans and masks: the spread of their differences is "
            f"{fmean(pairings):.2f} of that of runs that share nothing (mean of {len(pairings)} comparisons)."
        )
    yield ""
    if item.note:
        yield f"{item.note}\n"
    if marks:
        yield f"Data that differ from the published ones: {'; '.join(marks)}.\n"
    gpu = made["hardware"]["gpu"] or f"{made['hardware']['cores']} cores of {made['hardware']['cpu']}"
    yield f"*Hardware:* {gpu}. *Commit:* {made['commit']}. *Command:* `{made['command']}`"


def _differences(column: str, found: Sequence[LabelComparison]) -> Iterator[str]:
    """Table of the differences of a column."""
    yield f"| {column}: difference, seed by seed | mean | 95% interval | p | seeds | paired / unpaired spread |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for one in found:
        interval = "" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
        told = "" if one.measurable or one.interval is None else " (not measurable)"
        spread = "" if one.pairing is None else f"{one.spread:.2f} / {one.unpaired:.2f} = {one.pairing:.2f}"
        p = "" if one.p is None else f"{one.p:.3f}"
        label = f"{one.axis}: {one.label} over {one.base}"
        yield f"| {label} | {one.difference:+.2f}{told} | {interval} | {p} | {one.seeds} | {spread} |"


def _cell(found: Mapping[int, float], printed: float | None) -> str:
    """Mean and spread of our numbers, and the paper's."""
    values = list(found.values())
    ours = "-" if not values else f"{fmean(values):.2f}"
    spread = f" ± {stdev(values):.2f}" if len({*values}) > 1 else ""
    return ours + spread + ("" if printed is None else f" ({printed:.2f})")


def _draw(plan: ItemPlan, cells: Sequence[str], numbers: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Draws a bar for each finished cell and column, next to the paper's."""
    bars = []
    for column, found in numbers.items():
        for name in cells:
            printed = plan.item.printed.get(name, {}).get(column)
            if values := list(found.get(name, {}).values()):
                bars.append(Bar(f"{name}: {column}", max(0.0, fmean(values)), "kept", _cell(found[name], None)))
                if printed is not None:
                    bars.append(Bar("paper", printed, "short", f"{printed:.2f}"))
    if bars:
        from declutr.evaluation.report.png import save_bars  # loads matplotlib

        save_bars(Bars(RESULTS, plan.item.title, bars), plan.folder / f"{RESULTS}.png")
