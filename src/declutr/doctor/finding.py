"""Result of a check: one line for a person, the same for a program."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "FAIL"]
EVERYWHERE = "all"
"""Node name of a finding about all nodes."""


@dataclass(frozen=True)
class Finding:
    """Result of one check on one node.

    Attributes:
        name: subject of the check.
        node: node of the check; `all` for all nodes together.
        status: ok; warn: works, but slowly or not for long; FAIL: a run would stop, wait for ever or be open to others.
        value: value that was found.
        limit: limit for the value; empty if there is none.
        remedy: suggested action; empty if ok.
    """

    name: str
    node: str
    status: Status
    value: str
    limit: str = ""
    remedy: str = ""

    def line(self, node_width: int = 0) -> str:
        """Format the finding as a line, with its remedy below."""
        limit = f" ({self.limit})" if self.limit else ""
        remedy = f"\n{'':8s}-> {self.remedy}" if self.remedy else ""
        return f"{self.status:4s}  {self.node:{node_width}s}  {self.name}: {self.value}{limit}{remedy}"


def make_finding(
    name: str, node: str, value: str, *, limit: str = "", fail: bool = False, warn: bool = False, remedy: str = ""
) -> Finding:
    """Make a finding; its remedy is kept only if something must be fixed."""
    status: Status = "FAIL" if fail else "warn" if warn else "ok"
    return Finding(name, node, status, value, limit, remedy if status != "ok" else "")


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """Count findings by status."""
    number = {"ok": 0, "warn": 0, "FAIL": 0}
    for finding in findings:
        number[finding.status] += 1
    return number


def as_text(findings: Sequence[Finding]) -> str:
    """Format a line per finding, and a count."""
    width = max((len(finding.node) for finding in findings), default=0)
    number = counts(findings)
    summary = f"{number['ok']} ok, {number['warn']} to check (warn), {number['FAIL']} to fix (FAIL)"
    return "\n".join([*(finding.line(width) for finding in findings), summary]) + "\n"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings and counts for a program."""
    return {"findings": [asdict(finding) for finding in findings], "counts": counts(findings)}
