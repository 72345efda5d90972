"""A task's scores with their origin, and the report over tasks: averages of complete sets, missing tasks named.

Scores of a result, by procedure (units as in SentEval: accuracies, F1 and recalls in percent, correlations -1..1):
- inner_kfold, kfold, split: `acc`, `devacc`, and for MRPC `f1`;
- relatedness: `spearman`, `pearson`, `devpearson`, `mse`; by cosine (simcse): as `cosine` below;
- retrieval: `i2t_r1`, `i2t_r5`, `i2t_r10`, `t2i_r1`, `t2i_r5`, `t2i_r10`, and `devacc`, the sum of the six on dev;
- cosine: `spearman`, `pearson`, `devspearman`, `devpearson`;
- similarity: `spearman.mean`, `.wmean`, `.all`, of each subset, and the same with `pearson`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from declutr.evaluation.senteval.data.taskdata import Inspection, Standing
from declutr.evaluation.senteval.scores.averages import Average, averages, dev_headline, headline

Protocol = Literal["senteval", "simcse"]


@dataclass(frozen=True)
class TaskResult:
    """Scores of one encoder on one task."""

    task: str
    protocol: Protocol
    """Protocol that decides which number a table shows."""
    scores: Mapping[str, float]
    num_rows: int
    standing: Standing
    """Standing of the data compared with the published ones."""
    warnings: tuple[str, ...] = ()

    @property
    def headline(self) -> float:
        """Number shown in a table, in percent."""
        return headline(self.task, self.scores, self.protocol)

    @property
    def dev_headline(self) -> float:
        """The same number on dev data.

        Raises:
            NoDevScoreError: the task has none.
        """
        return dev_headline(self.task, self.scores)

    @property
    def comparable(self) -> bool:
        """Return whether published numbers are comparable with it without a mark."""
        return self.standing == "identical"


@dataclass(frozen=True)
class Report:
    """Results of one encoder under one protocol, by task.

    `missing` has the reason for each missing result: no data, refused data, or not requested.
    """

    encoder: str
    protocol: Protocol
    results: Mapping[str, TaskResult]
    missing: Mapping[str, str] = field(default_factory=dict)

    def averages(self) -> tuple[Average, ...]:
        """Averages of complete sets; an incomplete set has no value and names the missing tasks."""
        scores = {name: result.scores for name, result in self.results.items()}
        marked = {name for name, result in self.results.items() if not result.comparable}
        return averages(scores, self.protocol, marked)

    def to_json(self) -> dict[str, Any]:
        """Return all results, ready for `json.dumps`."""
        return {
            "encoder": self.encoder,
            "protocol": self.protocol,
            "results": {
                name: {**asdict(result), "scores": dict(result.scores), "headline": result.headline}
                for name, result in self.results.items()
            },
            "missing": dict(self.missing),
            "averages": [asdict(average) for average in self.averages()],
        }


def result_of(inspection: Inspection, protocol: Protocol, scores: Mapping[str, float], *warnings: str) -> TaskResult:
    """Combine scores with the standing and warnings of their data.

    Raises:
        ValueError: such data must not be scored.
    """
    if not inspection.usable or inspection.data is None:
        raise ValueError(f"{inspection.task.name}: {inspection.reason}")
    data = inspection.data
    told = tuple(str(finding) for finding in inspection.findings if finding.level != "info")
    scored = sum(len(split) for name, split in data.splits.items() if name not in ("train", "dev"))
    return TaskResult(inspection.task.name, protocol, dict(scores), scored, inspection.standing, (*warnings, *told))
