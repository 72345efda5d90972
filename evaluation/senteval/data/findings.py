"""Findings of a check of a task's data: one line each, with the effect on a score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from declutr.evaluation.senteval.data.taskdata import TaskData
from declutr.evaluation.senteval.data.tasks import SentEvalTask

Level = Literal["refuse", "warn", "info"]
Standing = Literal["identical", "published", "altered", "unpublished", "refused", "missing"]
MARKS: Mapping[Standing, str] = {
    "published": "the published rows in files with other bytes",
    "altered": "not the published files; comparable with no published number",
    "unpublished": "not the published data; comparable with no published number",
}
"""Reason for the mark on a score, by its data's standing."""


@dataclass(frozen=True)
class DataFinding:
    """One finding about the data."""

    level: Level
    """`refuse` (no score from such data), `warn` (shown with the score), `info`."""
    what: str
    faked: str = ""
    """False score that such data would give; "" if scores stay right."""

    def __str__(self) -> str:
        return f"{self.what} - {self.faked}" if self.faked else self.what


@dataclass(frozen=True)
class Inspection:
    """Data of a task and how far they can be trusted."""

    task: SentEvalTask
    standing: Standing
    """identical: every file equals the published one byte for byte. published: every row does, scored or not, but other
    bytes (line ends) differ. altered: rows, classes and labels match in number, but sentences differ or cannot be
    verified. unpublished: these differ too, and the user accepted that. refused. missing: the files do not exist. Only
    scores of identical data carry no mark."""
    findings: tuple[DataFinding, ...]
    """Worst first."""
    data: TaskData | None = None
    """Data of the task, None if missing or unreadable. Refused data are included for inspection."""

    @property
    def usable(self) -> bool:
        """Return whether a score may be computed."""
        return self.standing in ("identical", *MARKS)

    @property
    def reason(self) -> str:
        """Reason for a missing score, in one line; "" if a score may be computed."""
        if self.usable:
            return ""
        return "; ".join(str(finding) for finding in self.findings if finding.level == "refuse")
