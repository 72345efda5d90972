"""Scores of an item's runs, and its results: our numbers, the paper's, and paired differences over seeds.

Runs that share a seed share documents, spans, masks and initial weights. The difference of two labels of an axis is
taken seed by seed, as the mean over the combinations of the other axes' labels that both have: else the effects of
those axes would count as the label's. With two axes it is also taken within each label of the other one. Its interval
holds two sources of chance, other seeds and other test items: their variances add, and Student's t has the degrees of
freedom of their sum (Welch and Satterthwaite).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from declutr.common.cluster import SessionConfig
from declutr.common.errors import UsageError
from declutr.common.storage import hash_json, write_json, write_text
from declutr.encoders.loading import load_encoder
from declutr.evaluation.senteval.data import inspect
from declutr.evaluation.senteval.harness import Evaluated, ScoringChoice, evaluate
from declutr.evaluation.senteval.scores import Protocol, dev_headline
from declutr.evaluation.senteval.tasks import STS, TRANSFER, find
from declutr.reproduction.item import Column
from declutr.reproduction.plan import ItemPlan, PlannedRun
from declutr.reproduction.provenance import facts, origins
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS, find_latest

_CONFIDENCE = 0.95
_ROUNDING = 1e-9  # of numbers in percent, as a share of their difference if it is above 1

Numbers = Mapping[str, Mapping[int, float]]  # A column's numbers by cell and seed

Items = Mapping[str, Mapping[int, Sequence[float]]]
"""Errors of a column's test items (`bootstrap.item_errors`) by cell and seed; without those of runs that have none."""


def say(line: str) -> None:
    """Write a line on the progress to stderr."""
    sys.stderr.write(f"{line}\n")


class Scorer:
    """Scores runs of an item on SentEval's tasks."""

    def __init__(
        self,
        plan: ItemPlan,  # the item
        allow_unchecked: bool,  # score data other than the published ones
    ) -> None:
        if not plan.columns:
            raise UsageError(f"nothing can be scored: {'; '.join(plan.unscored.values())}; name --senteval")
        self._plan, folder = plan, plan.senteval
        scored = [(task, column) for column in plan.columns.values() for task in column.names]
        tasks = tuple(dict.fromkeys(task for task, _ in scored))
        self._tasks = [inspect(find(task), folder, allow_unchecked) for task in tasks]
        if unusable := [task for task in self._tasks if not task.usable]:
            reasons = "; ".join(f"{task.task.label}: {task.reason}" for task in unusable)
            remedy = "" if allow_unchecked else "; --allow-unchecked scores other data than the published ones"
            raise UsageError(f"{len(unusable)} of {len(tasks)} tasks cannot be scored in {folder} ({reasons}){remedy}")
        # STS12-16 alone name no protocol, and a choice needs one
        protocols = tuple(sorted({name for pair in scored if (name := _protocol(*pair))})) or ("senteval",)
        self._choice = ScoringChoice(protocols=protocols, classifier=plan.classifier, geometry=False)  # in no column
        self.marks = [f"{task.task.label}: {task.standing}" for task in self._tasks if task.standing != "identical"]
        """Tasks whose data are not the published ones, with their standing."""
        files = {task.task.name: [task.standing, dict(task.data.files)] for task in self._tasks if task.data}
        self.data = hash_json(files)  # of the tasks' files

    def score(self, run: PlannedRun) -> tuple[dict[str, float], dict[str, list[float]], list[str]]:
        """Numbers of a finished run by column, the errors of their test items, and the warnings of their scoring."""
        columns = self._plan.columns
        checkpoints = sorted({column.checkpoint for column in columns.values() if column.tasks})
        evaluated = {checkpoint: self._evaluate(run, checkpoint) for checkpoint in checkpoints}
        numbers, items = dict[str, float](), dict[str, list[float]]()
        for name, column in sorted(columns.items(), key=lambda pair: bool(pair[1].mean_of)):  # of others: last
            of_tasks = [number_of(task, column, evaluated[column.checkpoint]) for task in column.names]
            parts = [(numbers[other], items[other]) for other in column.mean_of] if column.mean_of else of_tasks
            numbers[name] = fmean(number for number, _ in parts)
            known = all(errors for _, errors in parts)
            items[name] = [error / len(parts) for _, errors in parts for error in errors] if known else []
        of_data = {finding for task in self._tasks for finding in task.findings}  # the same for all encoders
        warnings = dict[str, None]()
        for scored in evaluated.values():
            results = [result for report in scored.reports.values() for result in report.results.values()]
            lines = [(find(result.task).label, line) for result in results for line in result.warnings]
            warnings |= dict.fromkeys(scored.warnings)
            warnings |= {f"{label}: {line}": None for label, line in lines if line not in of_data}
        return {name: numbers[name] for name in columns}, items, list(warnings)

    def _evaluate(self, run: PlannedRun, checkpoint: str) -> Evaluated:
        name, pooling = (run.encoder.name, run.encoder.pooling) if run.encoder else (str(run.folder / "run"), None)
        if run.config and checkpoint == "last":
            if (last := find_latest(run.folder / "run" / CHECKPOINTS)) is None:
                raise UsageError(f"{name}: no checkpoint is left; delete the folder, and the command trains again")
            name = str(last[0])
        configs = [other.config for other in self._plan.runs if other.config]
        local = bool(configs) and all(config.scaling.local for config in configs)  # all in this process, without Ray
        model = load_encoder(name, pooling, device="cpu" if local else None, precision="fp32")  # as the papers
        columns = [column for column in self._plan.columns.values() if column.checkpoint == checkpoint]
        tasks = [task for task in self._tasks if any(task.task.name in column.names for column in columns)]
        session = SessionConfig(num_cpus=1 if local else None)
        return evaluate(model, tasks, self._choice, run.folder / "senteval", session, say)


def number_of(task: str, column: Column, evaluated: Evaluated) -> tuple[float, Sequence[float]]:
    """The number of a task, in percent, and the errors of its test items; none of a dev number, F1 or recall."""
    protocol = _protocol(task, column)
    report = next(iter(evaluated.reports.values())) if protocol is None else evaluated.reports[protocol]
    if task not in report.results:
        raise UsageError(f"{evaluated.encoder}: no score on {task}: {report.missing.get(task, 'unknown')}")
    result = report.results[task]
    if protocol is None:
        name = f"spearman.{column.number.replace('all_dev', 'all').replace('dev', 'mean')}"
        return 100 * result.scores[name], result.items.get(name, ())
    if column.number in ("dev", "all_dev"):
        return dev_headline(task, result.scores), ()
    shown = {"spearman", "acc"} & result.items.keys() if "f1" not in result.scores else ()
    return result.headline, next((result.items[name] for name in shown), ())


def _protocol(task: str, column: Column) -> Protocol | None:
    """The protocol that has the number of a task; None for STS12-16, which every protocol scores in all ways."""
    if find(task).procedure == "similarity":
        return None
    return "simcse" if column.number.startswith("all") and task in (*STS, *TRANSFER) else "senteval"


@dataclass(frozen=True)
class Difference:
    """A label of an axis against another one or the start."""

    axis: str  # the axis
    label: str  # the label
    base: str  # the label or start that it is compared with
    within: str  # label of the other axis; "" for the mean over all
    seeds: int  # number of seeds with all runs of both
    difference: float  # mean difference
    spread: float | None = None  # Standard deviation of the differences; None with one seed
    # 95% interval of the mean difference; None with one seed, or if nothing varies but by rounding.
    interval: tuple[float, float] | None = None
    p: float | None = None  # probability of such a difference if there is none (two-sided); None where the interval is
    items: int = 0  # number of test items whose choice the interval holds; 0: it holds seeds alone

    @property
    def measurable(self) -> bool:
        """True if the interval does not contain 0."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def compare_labels(
    cells: Mapping[str, Mapping[str, str]],  # label by axis of each cell, by its name; "" is no axis: not trained
    numbers: Numbers,  # the column's numbers of finished runs
    pairs: Sequence[tuple[str, str]] = (),  # labels to compare in place of an axis' others with its first
    items: Items | None = None,  # errors of the column's test items
) -> list[Difference]:
    """Labels against their axis' first label, or the axis' pairs, then untrained cells; none without a common seed."""
    differences = []
    trained = {name: own for name, own in cells.items() if own and "" not in own}
    starts = [name for name in cells if name not in trained]
    cell_of = {frozenset(own.items()): name for name, own in trained.items()}
    labels_of: dict[str, list[str]] = {}
    for axis, label in dict.fromkeys(pair for own in trained.values() for pair in own.items()):
        labels_of.setdefault(axis, []).append(label)
    for axis, labels in labels_of.items():
        compared = [pair for pair in pairs if {*labels} & {*pair}] or [(label, labels[0]) for label in labels[1:]]
        compared = [pair for pair in compared if {*pair} <= {*labels}]
        compared += [(label, start) for start in starts for label in labels]
        others = [name for name in labels_of if name != axis]
        insides = labels_of[others[0]] if len(others) == 1 else []
        for within, (label, base) in product(["", *(insides if len(insides) > 1 else [])], compared):
            twins = {
                name: base if base in starts else cell_of.get(frozenset({**own, axis: base}.items()))
                for name, own in trained.items()
                if own[axis] == label and within in ("", *own.values())
            }
            twins = {name: twin for name, twin in twins.items() if twin}
            ours, theirs = _by_seed(twins, numbers), _by_seed({*twins.values()}, numbers)
            if seeds := sorted(ours.keys() & theirs.keys()):  # pairs: seeds differ more than labels
                gains = [ours[seed] - theirs[seed] for seed in seeds]
                errors = _item_errors(twins, seeds, items or {})
                differences.append(_compare((axis, label, base, within), gains, errors))
    return differences


def _by_seed(names: Iterable[str | None], numbers: Numbers) -> dict[int, float]:
    """Mean over these cells, by seed, of the seeds that have all."""
    columns = [numbers.get(name, {}) for name in names if name]  # of all cells, or the others' effects would count
    seeds = columns[0] if columns else {}
    return {seed: fmean(column[seed] for column in columns) for seed in seeds if all(seed in c for c in columns)}


def _item_errors(twins: Mapping[str, str | None], seeds: Iterable[int], items: Items) -> NDArray[np.float64]:
    """Errors of the test items in the mean difference of these pairs of cells; empty if a run has none."""
    known = [
        (items.get(ours, {}).get(seed, ()), items.get(theirs or "", {}).get(seed, ()))
        for ours, theirs in twins.items()
        for seed in seeds
    ]
    if not all(len(ours) == len(theirs) > 0 for ours, theirs in known):
        return np.empty(0)
    return np.mean([np.subtract(*pair) for pair in known], axis=0)  # the same items in all runs


def _compare(sides: tuple[str, str, str, str], gains: Sequence[float], errors: NDArray[np.float64]) -> Difference:
    mean, count = fmean(gains), len(gains)
    if count < 2:
        return Difference(*sides, count, mean)
    spread = stdev(gains)
    of_seeds, of_items = spread**2 / count, float(errors @ errors)
    if of_seeds + of_items <= (_ROUNDING * max(1.0, abs(mean))) ** 2:  # a t-test of equal differences divides by zero
        return Difference(*sides, count, mean, spread)
    # Welch and Satterthwaite: degrees of freedom of a sum of two estimated variances
    freedom = (of_seeds + of_items) ** 2 / (of_seeds**2 / (count - 1) + of_items**2 / max(len(errors) - 1, 1))
    scale = (of_seeds + of_items) ** 0.5
    low, high = stats.t.interval(_CONFIDENCE, freedom, mean, scale)
    p = 2 * float(stats.t.sf(abs(mean) / scale, freedom))
    return Difference(*sides, count, mean, spread, (float(low), float(high)), p, len(errors))


def write_results(
    plan: ItemPlan,  # the item
    scored: Sequence[tuple[PlannedRun, Mapping[str, Any] | None]],  # each run with its scores, None without any
    command: Sequence[str],  # arguments of the command
    failed: Mapping[str, str],  # reason of each run of this call that failed, by its name
) -> str:
    """Writes the files from the runs that have finished; returns the Markdown."""
    cells, seeds = {run.cell: run for run in plan.runs}, sorted({run.seed for run in plan.runs})
    finished = [(run, record) for run, record in scored if record]
    records = {run.name: record for run, record in finished}
    numbers: dict[str, dict[str, dict[int, float]]] = {heading: {} for heading in plan.columns}
    items: dict[str, dict[str, dict[int, Sequence[float]]]] = {heading: {} for heading in plan.columns}
    for run, record in finished:
        of_seeds = [run.seed] if run.config else seeds  # an encoder's stand beside those of each seed
        for heading, value in record["scores"].items():
            numbers[heading].setdefault(run.cell, {}).update(dict.fromkeys(of_seeds, value))
            if errors := record.get("items", {}).get(heading):
                items[heading].setdefault(run.cell, {}).update(dict.fromkeys(of_seeds, errors))
    labels = {cell: run.labels for cell, run in cells.items()}
    compared = {
        heading: compare_labels(labels, column, plan.item.pairs, items[heading]) if plan.item.axes else []
        for heading, column in numbers.items()
    }
    now = facts(["declutr reproduce", *command])
    results: dict[str, Any] = {
        "item": plan.name,
        "scale": plan.scale,
        "source": plan.item.source,
        "finished_runs": len(records),
        "planned_runs": len(plan.runs),
        "numbers": numbers,
        "printed": plan.item.printed,
        "differences": {
            heading: [asdict(row) | {"measurable": row.measurable} for row in column]
            for heading, column in compared.items()
        },
        "seconds": {name: record["seconds"] for name, record in records.items()},
        "failed": dict(failed),
        "not_scored": plan.unscored,
        "warnings": {name: record["warnings"] for name, record in records.items() if record["warnings"]},
        "trained_by": _distinct(machine for record in records.values() for machine in record["trained"]),
        "scored_by": _distinct(record["made"] for record in records.values()),
        "not_published_data": sorted({mark for record in records.values() for mark in record["marks"]}),
        "settings": plan.settings.model_dump(mode="json"),
    }
    write_json(plan.folder / f"{plan.results}.json", results | now)
    text = "\n".join(_markdown(plan, cells, results, compared, now)) + "\n"
    write_text(plan.folder / f"{plan.results}.md", text)
    return text


def _distinct(rows: Iterable[Any]) -> list[Any]:
    return [*{hash_json(row): row for row in rows}.values()]  # a dict cannot be in a set


def _markdown(
    plan: ItemPlan,
    cells: Mapping[str, PlannedRun],
    results: Mapping[str, Any],
    compared: Mapping[str, Sequence[Difference]],
    now: Mapping[str, Any],
) -> Iterator[str]:
    part = ", a part of the item" if plan.partial else ""
    yield f"# {plan.item.title}\n\n*Paper:* {plan.item.source}. {plan.item.says}\n"
    finished = f"{results['finished_runs']} of {len(plan.runs)} runs{part}"
    yield f"Scale {plan.scale}: {finished}. Mean ± standard deviation over seeds; the"
    yield "paper's number in parentheses; n: seeds, where runs are missing.\n"
    yield f"| run | {' | '.join(plan.columns)} |\n| --- | {' | '.join('---:' for _ in plan.columns)} |"
    for name, run in cells.items():
        planned = len({other.seed for other in plan.runs if other.cell == name or run.encoder})
        printed = plan.item.printed.get(name, {})
        columns = results["numbers"].items()
        shown = (_cell(column.get(name, {}), printed.get(heading), planned) for heading, column in columns)
        yield f"| {name} | {' | '.join(shown)} |"
    for heading, differences in compared.items():
        if differences:
            yield f"\n| {heading}: difference, seed by seed | mean | 95% interval | p | seeds | test items |"
            yield "| --- | ---: | ---: | ---: | ---: | ---: |"
            yield from map(difference_row, differences)
    yield f"\n{plan.item.note}\n" if plan.item.note else ""
    for title, key in (("Warnings of the scoring", "warnings"), ("Failed", "failed"), ("Not scored", "not_scored")):
        if results[key]:
            yield f"{title}:\n"
            for name, note in results[key].items():
                yield f"- {name}: {note if isinstance(note, str) else '; '.join(note)}"
            yield ""
    if results["not_published_data"]:
        yield f"Data that differ from the published ones: {'; '.join(results['not_published_data'])}.\n"
    trainers, scorers = (origins(results[key] or results["scored_by"] or [now]) for key in ("trained_by", "scored_by"))
    origin = scorers if trainers == scorers else f"Trained by: {trainers} Scored by: {scorers}"
    yield f"{origin} *Command:* `{now['command']}`"


def difference_row(row: Difference) -> str:
    """A difference as a row of a Markdown table."""
    remark = "" if row.measurable else " (one seed)" if row.seeds == 1 else " (not measurable)"
    interval = "" if row.interval is None else f"{row.interval[0]:+.2f} to {row.interval[1]:+.2f}"
    p = "" if row.p is None else f"{row.p:.3f}"
    label = f"{row.axis}: {row.label} over {row.base}" + (f", {row.within}" if row.within else "")
    items = row.items or "not in the interval"
    return f"| {label} | {row.difference:+.2f}{remark} | {interval} | {p} | {row.seeds} | {items} |"


def _cell(values: Mapping[int, float], printed: float | None, planned: int) -> str:
    """Mean and spread of our numbers, their number if it is not the planned one, and the paper's number."""
    numbers = list(values.values())
    ours = f"{fmean(numbers):.2f}" if numbers else "-"
    spread = f" ± {stdev(numbers):.2f}" if len({*numbers}) > 1 else ""
    fewer = f", n={len(numbers)}" if 0 < len(numbers) < planned else ""
    return ours + spread + fewer + ("" if printed is None else f" ({printed:.2f})")
