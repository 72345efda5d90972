"""What a check of a task's data says: a line each, with what a score on such data would have faked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from evaluation.senteval.data.taskdata import TaskData
from evaluation.senteval.data.tasks import Task

Level = Literal["refuse", "warn", "info"]
Standing = Literal["identical", "published", "altered", "unpublished", "refused", "missing"]
MARKS: Mapping[Standing, str] = {
    "published": "the published rows in files with other bytes",
    "altered": "not the published files; comparable with no published number",
    "unpublished": "not the published data; comparable with no published number",
}
"""Why a score is marked, by its data's standing."""


@dataclass(frozen=True)
class Finding:
    """One thing about the data.

    Attributes:
        level: refuse (no score from such data), warn (a score, with this beside it), info.
        what: in words, with the numbers.
        faked: what a score would have looked like; "" where nothing would be faked.
    """

    level: Level
    what: str
    faked: str = ""

    def __str__(self) -> str:
        return f"{self.what} - {self.faked}" if self.faked else self.what


@dataclass(frozen=True)
class Inspection:
    """A task's data and how far they can be trusted.

    Attributes:
        task: whose.
        standing: identical: every file is the published one, byte for byte; published: every row is, scored or not, and
            some other bytes are not (line ends); altered: rows, classes and labels are in number, and sentences differ
            or cannot be verified; unpublished: even these differ, and the user said to go on; refused; missing: nothing
            is there. Only scores of identical data are not marked.
        findings: the worst first.
        data: None where there are none or they could not be read. Refused data are here too: to look at.
    """

    task: Task
    standing: Standing
    findings: tuple[Finding, ...]
    data: TaskData | None = None

    @property
    def usable(self) -> bool:
        """Whether a score may be computed."""
        return self.standing in ("identical", *MARKS)

    @property
    def mark(self) -> str:
        """What stands beside a score in a table: "" or why it is not comparable with published ones."""
        return MARKS.get(self.standing, "")

    @property
    def reason(self) -> str:
        """Why there is no score, in one line; "" where there may be one."""
        if self.usable:
            return ""
        return "; ".join(str(finding) for finding in self.findings if finding.level == "refuse")


def worst_first(findings: list[Finding]) -> tuple[Finding, ...]:
    """Refusals, warnings, then information; in their own order otherwise."""
    return tuple(sorted(findings, key=lambda finding: ("refuse", "warn", "info").index(finding.level)))
