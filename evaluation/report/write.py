"""`declutr report SHARDS`: report.html and its charts as PNG."""

from pathlib import Path

from common.storage import write_text
from evaluation.report.content import bar_charts, gather, lengths_chart
from evaluation.report.page import page
from evaluation.report.png import save_bars, save_histogram

REPORT = "report"
"""Default folder of the report, next to the shards."""


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes the report of a prepared corpus; the same corpus with the same times of its files gives the same bytes.

    Args:
        folder: output folder of `prepare`.
        output: folder for `report.html` and `charts/*.png`; `report` in the first when None.

    Returns:
        Path of the page.

    Raises:
        ShardError: files that are missing or damaged, or ledgers that contradict the manifest.
    """
    target = output or folder / REPORT
    content = gather(folder)
    if content.texts is None:
        save_histogram(lengths_chart(content), target / "charts" / "lengths.png")
    for chart in bar_charts(content):
        save_bars(chart, target / "charts" / f"{chart.name}.png")
    path = target / "report.html"
    write_text(path, page(content))
    return path
