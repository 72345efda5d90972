"""Contents of a report, gathered from a prepared folder, and the charts made from them."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from declutr.evaluation.report.charts import Bar, Bars, Histogram, ReferenceLine, Role, Series
from declutr.evaluation.report.examples import Clusters, Example, find_clusters, kept_examples, rejected_examples
from declutr.evaluation.report.markup import share
from declutr.evaluation.report.rows import MediaSurvey, TextSurvey, media_bars, survey_media, survey_texts, text_bars
from declutr.evaluation.report.survey import NUM_BINS, Survey, survey
from declutr.evaluation.report.tally import Tally, group_sources, total
from declutr.pipeline.job.estimate import Estimate, load_estimate
from declutr.pipeline.job.progress import seconds_spent
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.shards.manifest import MANIFEST, SPLITS, Manifest, ShardError, load_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards
from declutr.pipeline.shards.windows import TOO_SHORT
from declutr.trainer.objectives.config import RunContext
from declutr.trainer.objectives.registry import DEFAULT
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.setup.coverage import Coverage, coverage

_SHOWN_NAMES = 20
_PASSES = 3


@dataclass(frozen=True)
class Content:
    """A prepared corpus in figures and examples. Made by `gather`."""

    name: str
    prepared: datetime
    manifest: Manifest
    found: Survey
    clusters: Clusters
    kept: list[Example]
    rejected: dict[str, list[Example]]
    estimate: Estimate | None
    seconds: float | None
    """Duration of the preparation, summed over all its runs."""
    statuses: dict[str, Tally]
    texts: TextSurvey | None
    """Figures of short texts; None for documents, images and audio."""
    media: MediaSurvey | None
    """Figures of images or clips; None for texts."""
    coverage: Coverage | None
    """Tokens that three passes of DeCLUTR read; None without training documents."""

    @property
    def noun(self) -> str:
        """Noun for its rows."""
        return self.manifest.noun

    @property
    def kept_tally(self) -> Tally:
        """All kept documents."""
        return total(self.statuses.get(split, Tally()) for split in SPLITS)

    def reasons(self) -> list[tuple[str, Role, Tally]]:
        """Reasons for which documents are not kept, the most frequent first."""
        told: list[tuple[str, Role, Tally]] = [
            (
                reason,
                "failed" if reason in self.manifest.failed else "short" if reason == TOO_SHORT else "dropped",
                tally,
            )
            for reason, tally in self.statuses.items()
            if reason not in SPLITS
        ]
        return sorted(told, key=lambda item: (-item[2].read, item[0]))

    def sources(self) -> list[tuple[str, Tally]]:
        """The sources with the most kept tokens, by folder where there are many, and the rest as one."""
        found = self.found.sources
        return found.largest(group_sources(found.all(), _SHOWN_NAMES), _SHOWN_NAMES)

    def languages(self) -> list[tuple[str, Tally]]:
        """Languages by kept tokens; empty when no language was determined."""
        rows = self.found.languages.largest(self.found.languages.all(), _SHOWN_NAMES)
        return [(name or "not determined", tally) for name, tally in rows] if any(name for name, _ in rows) else []

    def median_tokens(self) -> int:
        """Median length of the kept documents, to a quarter of an octave."""
        counts = np.sum([self.found.lengths.get(split, np.zeros(NUM_BINS, np.int64)) for split in SPLITS], axis=0)
        half = int(np.searchsorted(np.cumsum(counts), counts.sum() / 2))
        edges = self.found.bin_edges()
        return round(float(np.sqrt(edges[half] * edges[half + 1])))


def gather(folder: Path) -> Content:
    """Reads the contents of a report.

    Raises:
        ShardError: a file is missing or damaged, or the ledgers contradict the manifest.
    """
    manifest = load_manifest(folder)
    if problems := check_shards(folder):
        raise ShardError("\n".join(problems))
    found = survey(folder, manifest)
    return Content(
        name=folder.absolute().name,
        prepared=datetime.fromtimestamp(int((folder / MANIFEST).stat().st_mtime), UTC),
        manifest=manifest,
        found=found,
        clusters=find_clusters(folder, found),
        kept=kept_examples(folder, manifest),
        rejected=rejected_examples(folder, found),
        estimate=load_estimate(folder),
        seconds=seconds_spent(folder),
        statuses=found.statuses.all(),
        texts=survey_texts(folder, manifest),
        media=survey_media(folder, manifest),
        coverage=_coverage(folder, manifest),
    )


def _coverage(folder: Path, manifest: Manifest) -> Coverage | None:
    """Tokens that three passes read with the spans of the shards' geometry."""
    if manifest.content.kind != "documents" or not manifest.totals["kept_train"]:
        return None
    geometry = manifest.geometry
    spans = SpanConfig(
        num_anchors=geometry.num_anchors,
        max_tokens=geometry.max_tokens,
        min_tokens=min(geometry.min_tokens, geometry.max_tokens),
    )
    run = RunContext(spans=spans, short_documents=manifest.short_documents)
    return coverage(DEFAULT, run, ShardSet(folder, "train"), _PASSES)


def lengths_chart(content: Content) -> Histogram:
    """Lengths of all documents that were tokenized, by status."""
    lengths, geometry = content.found.lengths, content.manifest.geometry
    none = np.zeros(NUM_BINS, np.int64)
    kept = np.sum([lengths.get(split, none) for split in SPLITS], axis=0)
    short = lengths.get(TOO_SHORT, none)
    others = np.sum(
        [counts for status, counts in lengths.items() if status not in (*SPLITS, TOO_SHORT)] or [none], axis=0
    )
    series = [Series("kept", "kept", kept), Series("short", "too short", short)]
    if others.any():
        series.append(Series("dropped", "dropped for other reasons", others))
    told = {geometry.max_tokens: "longest span", geometry.min_document_tokens: "room for all anchors"}
    told[content.found.shortest] = "shortest document kept"
    marks = [ReferenceLine(limit, f"{limit:,}: {told[limit]}") for limit in content.found.limits]
    edges = content.found.bin_edges()
    if content.media is not None:
        axis = f"{size_noun(content.manifest.content.kind)} (logarithmic)"
        return Histogram("lengths", f"{content.noun.capitalize()} by size", axis, edges, series[:1], []).trimmed()
    return Histogram("lengths", "Documents by length", "tokens (logarithmic)", edges, series, marks).trimmed()


def bar_charts(content: Content) -> list[Bars]:
    """The bar charts that have something to show."""
    totals = content.manifest.totals
    reasons = [
        Bar(reason, tally.read, role, f"{tally.read:,} ({share(tally.read, totals['read'])})")
        for reason, role, tally in content.reasons()
    ]
    charts = [Bars("reasons", f"{content.noun.capitalize()} that are not kept, by reason", reasons)]
    for name, title, rows in (
        ("sources", f"Kept {size_noun(content.manifest.content.kind)} by source", content.sources()),
        ("languages", "Kept tokens by language", content.languages()),
    ):
        bars = [
            Bar(
                label,
                tally.kept_tokens,
                "kept",
                f"{tally.kept_tokens:,} ({share(tally.kept_tokens, totals['num_tokens'])})",
            )
            for label, tally in rows
        ]
        charts.append(Bars(name, title, bars))
    sizes = [
        Bar(f"{size} {content.noun}", number, "dropped", f"{number:,}") for size, number in content.clusters.by_size()
    ]
    charts.append(Bars("clusters", "Clusters of duplicates by size", sizes))
    if content.media is not None:
        charts += media_bars(content.media, content.manifest)
    if content.texts is not None:
        charts += text_bars(content.texts, content.manifest.labels)
    return [chart for chart in charts if chart.bars]
