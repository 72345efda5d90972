"""Results of an item as `results.json`, `results.md` and a chart: our numbers, the paper's, and the differences."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from declutr.common.storage import write_json, write_text
from declutr.evaluation.report.charts import Bar, Bars
from declutr.reproduction.comparison import LabelComparison, compare_labels
from declutr.reproduction.plan import ItemPlan
from declutr.reproduction.provenance import facts, origins


def write_results(plan: ItemPlan, command: Sequence[str], data: str, failed: Mapping[str, str]) -> str:
    """Writes all files from the runs that have finished; returns the Markdown.

    Args:
        plan: the item.
        command: arguments of the command.
        data: hash of the tasks' data; scores of others are left out.
        failed: reason of each run of this call that failed, by its name.
    """
    cells = list({run.cell.name: run.cell for run in plan.runs}.values())
    numbers: dict[str, dict[str, dict[int, float]]] = {name: {} for name in plan.columns}
    seconds: dict[str, dict[int, float]] = {}
    warnings: dict[str, dict[int, list[str]]] = {}
    seeds, marks = sorted({run.seed for run in plan.runs}), set[str]()
    trained_by, scored_by = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in plan.runs:
        if found := plan.finished(run, data):
            marks |= {*found["marks"]}
            trained_by += [one for one in found["trained"] if one not in trained_by]
            scored_by += [found["made"]] if found["made"] not in scored_by else []
            if found["warnings"]:
                warnings.setdefault(run.cell.name, {})[run.seed] = found["warnings"]
            seconds.setdefault(run.cell.name, {})[run.seed] = found["seconds"]
            for name, value in found["scores"].items():
                scored = [run.seed] if run.config else seeds  # its numbers stand beside those of every seed
                numbers[name].setdefault(run.cell.name, {}).update(dict.fromkeys(scored, value))
    trained, pairs = bool(plan.item.axes), plan.item.pairs
    compared = {name: compare_labels(cells, found, pairs) if trained else [] for name, found in numbers.items()}
    made = facts(["declutr reproduce", *command])
    names = [cell.name for cell in cells]
    many = {name: _seeds(plan, name) for name in names}
    finished = sum(map(len, seconds.values()))
    trained_with, scored_with = (origins(one or scored_by or [made]) for one in (trained_by, scored_by))
    differing = trained_with != scored_with
    origin = f"Trained by: {trained_with} Scored by: {scored_with}" if differing else scored_with
    lines = _markdown(plan, many, numbers, compared, finished)
    notes = _notes(plan, sorted(marks), warnings, failed)
    text = "\n".join([*lines, *notes, f"{origin} *Command:* `{made['command']}`"]) + "\n"
    write_json(
        plan.folder / f"{plan.results}.json",
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
            "failed": dict(failed),
            "warnings": warnings,
            "trained_by": trained_by,
            "scored_by": scored_by,
            "not_published_data": sorted(marks),
            "settings": plan.settings.model_dump(mode="json"),
            **made,
        },
    )
    write_text(plan.folder / f"{plan.results}.md", text)
    _draw(plan, many, numbers)
    return text


def _markdown(
    plan: ItemPlan,
    cells: Mapping[str, int],
    numbers: Mapping[str, Mapping[str, Mapping[int, float]]],
    compared: Mapping[str, Sequence[LabelComparison]],
    finished: int,
) -> Iterator[str]:
    item, printed = plan.item, plan.item.printed
    yield f"# {item.title}"
    yield ""
    yield f"*Paper:* {item.source}. {item.says}"
    yield ""
    part = ", a part of the item" if plan.partial else ""
    yield f"Scale {plan.scale}: {finished} of {len(plan.runs)} runs{part}. Mean ± standard deviation over seeds; the"
    yield "paper's number in parentheses; n: seeds, where runs are missing."
    yield ""
    yield f"| run | {' | '.join(plan.columns)} |"
    yield "| --- | " + " | ".join(["---:"] * len(plan.columns)) + " |"
    for name, many in cells.items():
        shown = (
            _cell(found.get(name, {}), printed.get(name, {}).get(column), many) for column, found in numbers.items()
        )
        yield f"| {name} | {' | '.join(shown)} |"
    for column, differences in compared.items():
        if differences:
            yield ""
            yield from _differences(column, differences)
    pairings = [
        one.pairing for found in compared.values() for one in found if one.pairing is not None and not one.within
    ]
    if pairings:
        yield ""
        yield (
            "Runs that share a seed share documents, spans and masks: the spread of their differences is "
            f"{fmean(pairings):.2f} of that of runs that share nothing (mean of {len(pairings)} comparisons)."
        )
    yield ""


def _notes(
    plan: ItemPlan,
    marks: Sequence[str],
    warnings: Mapping[str, Mapping[int, Sequence[str]]],
    failed: Mapping[str, str],
) -> Iterator[str]:
    """What a reader of the tables must know."""
    if plan.item.note:
        yield f"{plan.item.note}\n"
    if warnings:
        yield "Warnings of the scoring:\n"
        yield from (
            f"- {name}, seed {seed}: {'; '.join(one)}" for name, by in warnings.items() for seed, one in by.items()
        )
        yield ""
    if marks:
        yield f"Data that differ from the published ones: {'; '.join(marks)}.\n"
    if failed:
        yield f"Failed: {'; '.join(f'{name}: {reason}' for name, reason in failed.items())}.\n"


def _seeds(plan: ItemPlan, cell: str) -> int:
    """Planned seeds of a cell; one that is scored as it is stands beside all."""
    same = [run for run in plan.runs if run.cell.name == cell]
    return len(same) if same[0].config else len({run.seed for run in plan.runs})


def _differences(column: str, found: Sequence[LabelComparison]) -> Iterator[str]:
    """Table of the differences of a column."""
    yield f"| {column}: difference, seed by seed | mean | 95% interval | p | seeds | paired / unpaired spread |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for one in found:
        interval = "" if one.interval is None else f"{one.interval[0]:+.2f} to {one.interval[1]:+.2f}"
        told = "" if one.measurable else " (one seed)" if one.seeds == 1 else " (not measurable)"
        spread = "" if one.pairing is None else f"{one.spread:.2f} / {one.unpaired:.2f} = {one.pairing:.2f}"
        p = "" if one.p is None else f"{one.p:.3f}"
        label = f"{one.axis}: {one.label} over {one.base}" + (f", {one.within}" if one.within else "")
        yield f"| {label} | {one.difference:+.2f}{told} | {interval} | {p} | {one.seeds} | {spread} |"


def _cell(found: Mapping[int, float], printed: float | None, planned: int) -> str:
    """Mean and spread of our numbers, their number if it is not the planned one, and the paper's number."""
    values = list(found.values())
    ours = "-" if not values else f"{fmean(values):.2f}"
    spread = f" ± {stdev(values):.2f}" if len({*values}) > 1 else ""
    fewer = f", n={len(values)}" if 0 < len(values) < planned else ""
    return ours + spread + fewer + ("" if printed is None else f" ({printed:.2f})")


def _draw(plan: ItemPlan, cells: Mapping[str, int], numbers: Mapping[str, Mapping[str, Mapping[int, float]]]) -> None:
    """Draws a bar for each finished cell and column, next to the paper's."""
    bars = []
    for column, found in numbers.items():
        for name, many in cells.items():
            printed = plan.item.printed.get(name, {}).get(column)
            if values := list(found.get(name, {}).values()):
                bars.append(Bar(f"{name}: {column}", max(0.0, fmean(values)), "kept", _cell(found[name], None, many)))
                if printed is not None:
                    bars.append(Bar("paper", printed, "short", f"{printed:.2f}"))
    if bars:
        from declutr.evaluation.report.png import save_bars  # loads matplotlib

        save_bars(Bars("results", plan.item.title, bars), plan.folder / f"{plan.results}.png")
