"""The page on runs: one HTML file without scripts, other files or network requests."""

from collections.abc import Sequence
from pathlib import Path

from declutr.common.config import ConfigError
from declutr.common.storage import write_text
from declutr.evaluation.report.markup import tag
from declutr.evaluation.report.page import REPORT, document, sectioned
from declutr.inspection.order import OrderError, RunOrder, read_order
from declutr.inspection.runs import sections
from declutr.inspection.runs.record import RunError, RunRecord, read_runs
from declutr.inspection.runs.span_lengths import Lengths, span_lengths
from declutr.pipeline.shards.manifest import ShardError

_MOST_RUNS = 8  # colours of the style sheet


def write_run_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Writes `report.html` on runs to `output`, or to the folder `report` of the first; returns the page.

    Raises:
        RunError: a folder is not a run, has files that cannot be read, or there are too many.
    """
    if len(folders) > _MOST_RUNS:
        raise RunError(f"{len(folders)} runs: a page compares at most {_MOST_RUNS}; name fewer")
    runs = read_runs(folders)
    path = (output or folders[0] / REPORT) / "report.html"
    write_text(path, _page(runs))
    return path


def _page(runs: Sequence[RunRecord]) -> str:
    orders, spans, reasons = dict[str, RunOrder](), dict[str, list[tuple[str, Lengths]]](), list[str]()
    for run in runs:
        try:
            order = orders[run.name] = read_order(run.folder)
            spans[run.name] = [(name, found) for name, task in order.tasks.items() for found in span_lengths(task)]
        except (OrderError, ConfigError, ShardError, OSError) as error:
            missing = "its span lengths" if run.name in orders else "the length of the run and its span lengths"
            reasons.append(f"Without {missing}: {run.name}: {str(error).splitlines()[0]}")
    parts = {
        "verdict": ("Verdict", sections.verdicts(runs)),
        "loss": ("Losses", sections.losses(runs)),
        "corpora": ("Corpora", sections.corpora(runs, orders)),
        "optimizer": ("Learning rate and gradient", sections.optimizer(runs)),
        "speed": ("Speed", sections.speed(runs)),
        "scores": ("Held-out scores and spread", sections.scores(runs)),
        "lengths": ("Span lengths", sections.lengths(runs, spans)),
        "events": ("Time line", sections.events(runs)),
        "settings": ("Settings" if len(runs) == 1 else "Settings that differ", sections.settings(runs)),
    }
    title = f"Run report: {', '.join(run.name for run in runs)}"
    header = tag(
        "header",
        tag("p", "Run report", class_="kind"),
        tag("h1", ", ".join(run.name for run in runs)),
        sections.glance(runs, orders),
        *(tag("p", reason, class_="note") for reason in reasons),
    )
    return document(title, sectioned(header, parts, "the settings, metrics, summary and failures of these runs."))
