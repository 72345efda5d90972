"""The result of an adaptation: every row of the table, the verdict, what was lost; its JSON file and its page."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from declutr.adaptation.config import HELD_OUT, AdaptConfig
from declutr.adaptation.scores import MEANING, PAIRS, STATISTICS, Values, Verdict, compared
from declutr.common.bootstrap import Comparison
from declutr.common.storage import write_json
from declutr.encoders.transformer import TransformerEncoder
from declutr.report.page import write_page
from declutr.trainer.driver.model_card import Card, called

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
        """The row of these values, compared with the start's; a measure without a value is left out."""
        present = {
            measure: array[~np.isnan(array).any(axis=tuple(range(1, array.ndim)))] for measure, array in values.items()
        }
        scores = {measure: float(STATISTICS[measure](array)) for measure, array in present.items() if len(array)}
        comparisons = {
            measure: comparison for measure, comparison in compared(start, values, seed).items() if comparison.rows
        }
        return Row(name, kind, scores, {} if kind == "start" else comparisons)


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
                    "differences": {measure: _facts(comparison) for measure, comparison in row.differences.items()},
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


def adapted_card(config: AdaptConfig, result: Result, encoder: TransformerEncoder) -> str:
    """The card of the adapted encoder, with the scores on test documents."""
    pooling, layers = encoder.encoder.config.pooling, len(encoder.after) > 0
    measures = list(result.rows[0].scores)
    heads = ["", *(f"{measure} recall@1 (difference to the start, 95% interval)" for measure in measures)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[row.name, *(_score_cell(row, measure) for measure in measures)] for row in result.rows]
    looks = f" {_looks(result.looks)}" if result.looks > 1 else ""
    meanings = "\n".join(f"- {measure}: {MEANING[measure]}" for measure in measures)
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return Card(
        title=f"{called(config.encoder)} adapted to documents",
        base=config.encoder,
        method=f"Adapted without labels (DeCLUTR on Ray, `declutr adapt`): {result.chosen}. Pooling: {pooling}.\n",
        scores=f"{result.sentence}.{looks}\n\n{rows}\n\nPercent, {_held_out(result)}.\n{meanings}\n\n{result.general}",
        data=f"{result.facts['documents']:,.0f} documents, of which {1 - HELD_OUT:.0%} were trained on; "
        f"{result.facts['steps']:,.0f} steps.",
        settings=config.model_dump(mode="json"),
        pooling=pooling,
        layers=layers,
        tags=("declutr",),
    ).text()


def _held_out(result: Result) -> str:
    """Says which rows were scored: those that neither trained nor chose."""
    if result.primary != PAIRS:
        return "on documents from which it did not learn"
    return (
        "pairs on queries that neither trained nor chose it, though their texts may be among its documents, and all "
        "else on documents from which it did not learn"
    )


def _facts(comparison: Comparison) -> dict[str, Any]:
    low, high = comparison.interval or (None, None)
    return {
        "value": None if math.isnan(comparison.difference) else comparison.difference,
        "low": low,
        "high": high,
        "rows": comparison.rows,
    }


def write_adaptation_page(result: Result, path: Path) -> None:
    """Writes the page of a result."""
    from declutr.report.charts import draw_intervals  # loads matplotlib

    measures = [name for name in MEANING if name in result.rows[0].scores] if result.rows else []
    charts = []
    for measure in measures:
        differences = [(row.name, row.differences[measure]) for row in result.rows if measure in row.differences]
        points = [
            (name, 100 * pair.difference, pair.interval and (100 * pair.interval[0], 100 * pair.interval[1]))
            for name, pair in differences
        ]
        title = f"Difference to the start: {MEANING[measure]}"
        charts.append(draw_intervals(f"difference-{measure}", title, points))
    write_page(
        path,
        "adaptation.html",
        f"Adaptation: {result.verdict.outcome}",
        sections={"verdict": "Verdict", "test": "Test", "examples": "Passages whose nearest passage changed"},
        result=result,
        looks=_looks(result.looks) if result.looks > 1 else "",
        held_out=_held_out(result),
        heads=["", *(f"{measure} (difference to the start, 95% interval)" for measure in measures)],
        rows=[[row.name, *(_score_cell(row, measure) for measure in measures)] for row in result.rows],
        charts=charts,
    )


def _looks(looks: int) -> str:
    return (
        f"This is look {looks} at a test in this folder; an edited test counts as another look. Each is another chance "
        "to be lucky, so the interval is too narrow; new documents in another folder give a fresh test."
    )


def _score_cell(row: Row, measure: str) -> str:
    """A score in percent, and its difference to the start with the interval."""
    comparison, text = row.differences.get(measure), f"{100 * row.scores[measure]:.1f}"
    if comparison is not None:
        text += f" ({100 * comparison.difference:+.1f}"
        text += (
            f" [{100 * comparison.interval[0]:+.1f}, {100 * comparison.interval[1]:+.1f}])"
            if comparison.interval
            else ")"
        )
    return text
