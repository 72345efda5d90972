"""What a check answers: one line for a person, the same for a program."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "FAIL"]
EVERYWHERE = "all"
"""Node of a finding that is not about one node."""


@dataclass(frozen=True)
class Finding:
    """The outcome of one check on one node.

    Attributes:
        name: what was looked at.
        node: where; `all` for what concerns them together.
        status: ok; warn: works, but slowly or not for long; FAIL: a run will stop, wait for ever or be open to others.
        value: what was found.
        limit: what it was compared with; empty where there is nothing to compare.
        remedy: what to do; empty when it is ok.
    """

    name: str
    node: str
    status: Status
    value: str
    limit: str = ""
    remedy: str = ""

    def line(self, node_width: int = 0) -> str:
        """The finding as a line, with its remedy below."""
        limit = f" ({self.limit})" if self.limit else ""
        remedy = f"\n{'':8s}-> {self.remedy}" if self.remedy else ""
        return f"{self.status:4s}  {self.node:{node_width}s}  {self.name}: {self.value}{limit}{remedy}"


def judged(
    name: str, node: str, value: str, *, limit: str = "", fail: bool = False, warn: bool = False, remedy: str = ""
) -> Finding:
    """A finding whose remedy is said only where there is something to mend."""
    status: Status = "FAIL" if fail else "warn" if warn else "ok"
    return Finding(name, node, status, value, limit, remedy if status != "ok" else "")


def counts(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings have each status."""
    number = {"ok": 0, "warn": 0, "FAIL": 0}
    for finding in findings:
        number[finding.status] += 1
    return number


def as_text(findings: Sequence[Finding]) -> str:
    """A line a finding, and a count."""
    width = max((len(finding.node) for finding in findings), default=0)
    number = counts(findings)
    summary = f"{number['ok']} ok, {number['warn']} to look at (warn), {number['FAIL']} to mend (FAIL)"
    return "\n".join([*(finding.line(width) for finding in findings), summary]) + "\n"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for a program."""
    return {"findings": [asdict(finding) for finding in findings], "counts": counts(findings)}
