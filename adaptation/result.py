"""The result of an adaptation: every row of the table, the verdict, and what was lost; and its JSON file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from declutr.adaptation.scores import STATISTICS, Values, compared
from declutr.adaptation.verdict import Verdict
from declutr.common.bootstrap import Comparison
from declutr.common.storage import write_json

RESULT = "result.json"
Kind = Literal["start", "baseline", "candidate"]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: of the start, the baseline or the candidate.
        kind: of the row.
        scores: on test documents, by measure.
        differences: to the start, by measure.
    """

    name: str
    kind: Kind
    scores: dict[str, float]
    differences: dict[str, Comparison]

    @staticmethod
    def of(name: str, kind: Kind, start: Values, values: Values, seed: int) -> "Row":
        """The row of these values, compared with the start's."""
        scores = {
            measure: float(STATISTICS[measure](each[~np.isnan(each).reshape(len(each), -1).any(axis=1)]))
            for measure, each in values.items()
        }
        return Row(name, kind, scores, {} if kind == "start" else compared(start, values, seed))


@dataclass(frozen=True)
class SearchExample:
    """A passage whose nearest other passage changed.

    Attributes:
        passage: the text that searches.
        before: the nearest passage to the start's embedding, and whether it is of the same document.
        after: the same for the adapted encoder.
    """

    passage: str
    before: tuple[str, bool]
    after: tuple[str, bool]


@dataclass(frozen=True)
class Result:
    """All that `declutr adapt` found.

    Attributes:
        verdict: on the chosen candidate.
        sentence: the verdict in words.
        chosen: name of the candidate.
        primary: the measure that decided, named before.
        rows: the table.
        general: what was lost in general, in words.
        stsb: difference on STS-B's test set, if it was given.
        looks: looks at these test documents, this one included.
        encoder: folder of the adapted encoder; None if it is not better.
        examples: passages whose nearest passage changed.
        facts: numbers of documents, steps and seconds.
    """

    verdict: Verdict
    sentence: str
    chosen: str
    primary: str
    rows: list[Row]
    general: str
    stsb: Comparison | None
    looks: int
    encoder: Path | None
    examples: list[SearchExample] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)


def write_result(result: Result, folder: Path) -> None:
    """Writes `result.json`."""
    write_json(
        folder / RESULT,
        {
            "outcome": result.verdict.outcome,
            "sentence": result.sentence,
            "chosen": result.chosen,
            "primary": result.primary,
            "primary_difference": _facts(result.verdict.comparison),
            "rows_needed_for_one_point": result.verdict.rows_needed,
            "rows": [
                {
                    "name": row.name,
                    "kind": row.kind,
                    "scores": row.scores,
                    "differences": {measure: _facts(one) for measure, one in row.differences.items()},
                }
                for row in result.rows
            ],
            "general": result.general,
            "stsb": result.stsb and _facts(result.stsb),
            "looks": result.looks,
            "encoder": result.encoder and str(result.encoder),
            **result.facts,
        },
    )


def _facts(one: Comparison) -> dict[str, Any]:
    low, high = one.interval or (None, None)
    return {"value": one.difference, "low": low, "high": high, "rows": one.rows}
