"""Lines of text for the terminal about data and transfers."""

from collections import Counter
from collections.abc import Iterator, Sequence

from declutr.common.console.excerpt import excerpt
from declutr.evaluation.senteval.checks.checking import UNCHECKED
from declutr.evaluation.senteval.data.findings import Inspection
from declutr.evaluation.senteval.download.downloading import Fetched
from declutr.evaluation.senteval.download.sources import Sources

_SAID = {
    "identical": "the published files, byte for byte",
    "published": "every row as published, other bytes: scores are marked",
    "altered": "NOT the published files: scores are marked",
    "unpublished": "NOT the published set: scores are marked and not comparable",
    "refused": "REFUSED",
    "missing": "missing",
}


def overview(inspections: Sequence[Inspection]) -> Iterator[str]:
    """Format a line per task, its warnings and reasons below it, and a summary."""
    for inspection in inspections:
        rows = f"{inspection.data.num_rows:>9,} rows" if inspection.data else " " * 14
        yield f"{inspection.task.label:9s} {rows}  {_SAID[inspection.standing]}"
        told = [finding for finding in inspection.findings if finding.level != "info"]
        yield from (f"{'':26s}{finding.what}" for finding in told)
        if inspection.standing == "refused":  # several findings can fake the same score
            faked = dict.fromkeys(finding.faked for finding in told if finding.faked)
            yield from (f"{'':26s}a score would be: {what}" for what in faked)
    counts = Counter(inspection.standing for inspection in inspections)
    yield ", ".join(f"{number} {standing}" for standing, number in counts.items())
    if counts["refused"]:
        yield UNCHECKED


def transfers(fetched: Sequence[Fetched], sources: Sources) -> Iterator[str]:
    """List fetched files, failures with reasons, and files that cannot be fetched."""
    counts = Counter(file.outcome for file in fetched)
    yield f"files: {counts['fetched']} fetched, {counts['kept']} already present, {counts['failed']} failed"
    notes: dict[tuple[str, str], list[str]] = {}
    for file in fetched:
        if file.note:
            notes.setdefault((file.outcome, file.note), []).append(file.path)
    for (outcome, note), paths in notes.items():
        yield f"  {outcome}: {excerpt(paths)}: {note}"
    for gone in sources.gone:
        yield f"  cannot be fetched: {', '.join(gone.tasks)}: {gone.why}"
