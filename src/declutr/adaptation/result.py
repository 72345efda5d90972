"""The result of an adaptation: every row of the table, the verdict, what was lost; its JSON file and its page."""

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from declutr.adaptation.candidates import CLOSED
from declutr.adaptation.config import ENCODER, REPORT, AdaptConfig
from declutr.adaptation.scores import MEANING, PAIRS, TestSet, Values, Verdict, compared, moved
from declutr.common.bootstrap import MIN_ROWS, Comparison, compare, spearman
from declutr.common.console.logs import get_logger
from declutr.common.console.terminal import shorten
from declutr.common.errors import missing_extra
from declutr.common.paths import expand
from declutr.common.storage import atomic_folder, write_json, write_text
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.retrieval.compare import stsb_values
from declutr.report.page import write_page
from declutr.trainer.driver.model_card import CARD, Card, called

RESULT = "result.json"
Kind = Literal["start", "baseline", "candidate", "hybrid"]


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    # Name of the start, the baseline or the candidate; a hybrid adds the score of words that `declutr index` adds.
    name: str
    kind: Kind
    scores: dict[str, float]  # scores on test documents, by measure
    differences: dict[str, Comparison]  # differences to the start, by measure

    @staticmethod
    def of(name: str, kind: Kind, start: Values, values: Values, seed: int, min_rows: int = MIN_ROWS) -> "Row":
        """The row of these values, compared with the start's; a measure without a value is left out."""
        comparisons = {
            measure: comparison
            for measure, comparison in compared(start, values, seed, min_rows).items()
            if comparison.rows
        }
        scores = {measure: comparison.after for measure, comparison in comparisons.items()}
        return Row(name, kind, scores, {} if kind == "start" else comparisons)


def lost_in_general(
    start: TransformerEncoder, encoder: TransformerEncoder | None, config: AdaptConfig
) -> tuple[Comparison | None, str]:
    """Difference of the chosen encoder to the start on general sentences, with its words; None: nothing is chosen."""
    if encoder is None:
        return None, "--stsb: nothing is measured, because no encoder is written" if config.stsb else ""
    if config.stsb is None:
        sentence = f"Cosines of general sentences moved by {moved(start, encoder):.3f} on average"
        return None, f"{sentence} (--stsb FOLDER measures STS-B)"
    before, after = (stsb_values(model, expand(config.stsb)) for model in (start, encoder))
    comparison = compare(before, after, config.seed, spearman)
    assert comparison.interval is not None
    low, high = (100 * end for end in comparison.interval)
    return comparison, (
        f"STS-B test: {100 * comparison.before:.2f} before, {100 * comparison.after:.2f} after, difference "
        f"{100 * comparison.difference:+.2f} (95% interval {low:+.2f} to {high:+.2f})"
    )


_EXAMPLES, _SHOWN_CHARACTERS = 3, 300


class SearchExample(NamedTuple):
    """A passage whose nearest other passage changed."""

    passage: str  # the text that searches
    before: tuple[str, bool]  # the nearest passage to the start's embedding, and whether it is of the same document
    after: tuple[str, bool]  # the same for the adapted encoder


@dataclass(frozen=True)
class Result:
    """All that `declutr adapt` found."""

    verdict: Verdict  # verdict on the chosen candidate
    sentence: str  # the verdict in words
    chosen: str  # name of the candidate
    primary: str  # the measure that decided, named before
    rows: list[Row]  # the table
    general: str  # what was lost in general, in words
    stsb: Comparison | None  # difference on STS-B's test set, if it was given
    looks: int  # looks at these test documents, this one included
    encoder: Path | None  # folder of the adapted encoder; None if it is not better
    examples: list[SearchExample] = field(default_factory=list)  # passages whose nearest passage changed
    # Numbers of documents, of those trained on, of steps and seconds.
    facts: dict[str, float] = field(default_factory=dict)
    folded: bool = False  # whether five fits were judged, each on the documents that it left out

    @property
    def measures(self) -> list[str]:
        """Measures of the table."""
        return list(self.rows[0].scores) if self.rows else []

    def cells(self) -> list[list[str]]:
        """Names and scores of the rows in percent, with their differences to the start and the intervals of these."""
        return [[row.name, *(_cell(row, measure) for measure in self.measures)] for row in self.rows]

    def held_out(self) -> str:
        """Says which rows were scored: those that neither trained nor chose."""
        if self.folded:
            judged = "on documents from which the fit that was judged did not learn"
            return f"{judged}; the encoder learned from all" if self.encoder else judged
        if self.primary != PAIRS:
            return "on documents from which it did not learn"
        return (
            "pairs on queries that neither trained nor chose it, though their texts may be among its documents, and "
            "all else on documents from which it did not learn"
        )

    def warning(self) -> str:
        """Says that the test was used before; empty at the first look."""
        if self.looks < 2:
            return ""
        return (
            f"This is look {self.looks} at a test in this folder; an edited test counts as another look. Each is "
            "another chance to be lucky, so the interval is too narrow; new documents in another folder give a fresh "
            "test."
        )


def search_examples(test: TestSet, before: TransformerEncoder, after: TransformerEncoder) -> list[SearchExample]:
    """Passages that find their document only after the adaptation, and passages that found it only before."""
    passages = test.passages
    if not passages.num_documents:
        return []
    first, second = test.nearest(before), test.nearest(after)
    right = [passages.owners[nearest] == passages.owners for nearest in (first, second)]
    chosen = [*np.flatnonzero(~right[0] & right[1])[:_EXAMPLES], *np.flatnonzero(right[0] & ~right[1])[:_EXAMPLES]]

    def nearest(rows: NDArray[np.int64], place: int) -> tuple[str, bool]:
        return excerpt(rows[place]), bool(passages.owners[rows[place]] == passages.owners[place])

    def excerpt(place: int) -> str:
        return shorten(" ".join(passages.texts[place].split()), _SHOWN_CHARACTERS)

    return [SearchExample(excerpt(place), nearest(first, place), nearest(second, place)) for place in chosen]


def write(
    result: Result,
    output: Path,  # of the command
    candidate: Path,  # folder of the chosen one
    encoder: TransformerEncoder | None,  # in it; None: nothing is chosen
    config: AdaptConfig,
) -> None:
    """Writes the encoder if it is better, `result.json`, and the page if its extra is installed."""
    place, page = output / ENCODER, output / REPORT
    if encoder is not None and result.encoder is not None:
        with atomic_folder(place, replace=True) as aside:
            shutil.copytree(candidate, aside, dirs_exist_ok=True)  # `aside` exists already
            write_text(aside / CARD, adapted_card(config, result, encoder))
    elif place.exists():
        shutil.rmtree(place)  # of an earlier verdict; a folder that looks like a result would be used
    write_result(result, output)
    if lack := missing_extra("report", f"{page} is not written"):
        page.unlink(missing_ok=True)  # it would show an earlier verdict
        get_logger().warning("%s, and the same command writes it", lack)
    else:
        write_adaptation_page(result, page)


def write_result(result: Result, folder: Path) -> None:
    """Writes `result.json`."""
    rows = [
        {"name": row.name, "kind": row.kind, "scores": row.scores}
        | {"differences": {measure: _facts(comparison) for measure, comparison in row.differences.items()}}
        for row in result.rows
    ]
    values = {
        "outcome": result.verdict.outcome,
        "sentence": result.sentence,
        "chosen": result.chosen,
        "primary": result.primary,
        "primary_difference": _facts(result.verdict.comparison),
        "rows_needed_for_one_point": result.verdict.rows_needed,
        "rows": rows,
        "general": result.general,
        "stsb": result.stsb and _facts(result.stsb),
        "looks": result.looks,
        "encoder": result.encoder and str(result.encoder),
    }
    write_json(folder / RESULT, values | result.facts)


def _facts(comparison: Comparison) -> dict[str, Any]:
    low, high = comparison.interval or (None, None)
    value = None if math.isnan(comparison.difference) else comparison.difference  # JSON has no NaN
    return {"value": value, "low": low, "high": high, "rows": comparison.rows}


def _cell(row: Row, measure: str) -> str:
    text = f"{100 * row.scores[measure]:.1f}"
    if (comparison := row.differences.get(measure)) is None:
        return text
    low, high = (100 * end for end in comparison.interval or (0.0, 0.0))
    interval = f" [{low:+.1f}, {high:+.1f}]" if comparison.interval else ""
    return f"{text} ({100 * comparison.difference:+.1f}{interval})"


def adapted_card(config: AdaptConfig, result: Result, encoder: TransformerEncoder) -> str:
    """The card of the adapted encoder, with the scores on test documents."""
    heads = ["", *(f"{measure} recall@1 (difference to the start, 95% interval)" for measure in result.measures)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *result.cells()])
    warning = f" {result.warning()}" if result.looks > 1 else ""
    meanings = "\n".join(f"- {measure}: {MEANING[measure]}" for measure in result.measures)
    pooling = encoder.encoder.config.pooling
    return Card(
        title=f"{called(config.encoder)} adapted to documents",
        base=config.encoder,
        method=f"Adapted without labels (DeCLUTR on Ray, `declutr adapt`): {result.chosen}. Pooling: {pooling}.\n",
        scores=f"{result.sentence}.{warning}\n\n{table}\n\nPercent, {result.held_out()}.\n{meanings}\n\n"
        f"{result.general}",
        data=f"{result.facts['documents']:,.0f} documents, of which {result.facts['training_documents']:,.0f} were "
        f"trained on; {0 if result.chosen == CLOSED else result.facts['steps']:,.0f} steps.",
        settings=config.model_dump(mode="json"),
        pooling=pooling,
        layers=len(encoder.after) > 0,
        tags=("declutr",),
        prompt=encoder.in_role("document").prompt,
        query_prompt=encoder.in_role("query").prompt,
    ).text()


def write_adaptation_page(result: Result, path: Path) -> None:
    """Writes the page of a result."""
    from declutr.report.charts import draw_intervals  # loads matplotlib

    charts = []
    for measure in result.measures:
        differences = {row.name: row.differences[measure] for row in result.rows if measure in row.differences}
        points = [
            (name, 100 * pair.difference, pair.interval and (100 * pair.interval[0], 100 * pair.interval[1]))
            for name, pair in differences.items()
        ]
        title = f"Difference to the start: {MEANING[measure]}"
        charts.append(draw_intervals(f"difference-{measure}", title, points))
    write_page(
        path,
        "adaptation.html",
        f"Adaptation: {result.verdict.outcome}",
        sections={"verdict": "Verdict", "test": "Test", "examples": "Passages whose nearest passage changed"},
        result=result,
        heads=["", *(f"{measure} (difference to the start, 95% interval)" for measure in result.measures)],
        charts=charts,
    )
