"""Sections of the page below its head. A section without contents is empty and left out."""

from itertools import pairwise

import numpy as np

from declutr.evaluation.report.charts import draw_bar, draw_histogram
from declutr.evaluation.report.content import Content, lengths_chart
from declutr.evaluation.report.markup import Html, details, in_mib, join, place, share, table, tag
from declutr.evaluation.report.survey import CONTAMINATED
from declutr.evaluation.report.tally import Tally
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.shards.ledger import Entry
from declutr.pipeline.shards.manifest import SPLITS
from declutr.pipeline.shards.windows import TOO_SHORT

_COMPARED = {
    "documents": "documents read",
    "kept": "documents kept",
    "num tokens": "tokens kept",
    "text bytes": "bytes of text",
    "shard bytes": "bytes of shards",
}
_NOTHING = Html("")
_SHOWN_SETS = 40
_SHOWN_FAILURES = 10


def lengths(content: Content) -> Html:
    """The histogram of lengths and the shares on either side of the limits."""
    chart = lengths_chart(content)
    limits = content.found.limits
    kept, short, others = (np.zeros((len(limits) + 1, 2), np.int64) for _ in range(3))
    for status, counts in content.found.bands.items():
        kind = kept if status in SPLITS else short if status == TOO_SHORT else others
        kind += counts
    every = kept + short + others
    names = [f"under {limits[0]:,}", *(f"{low:,} to {high - 1:,}" for low, high in pairwise(limits))]
    rows: list[list[object]] = [
        [
            name,
            *(int(kind[i, 0]) for kind in (kept, short, others)),
            *(share(every[i, k], every[:, k].sum()) for k in (0, 1)),
        ]
        for i, name in enumerate([*names, f"{limits[-1]:,} and more"])
    ]
    missing = content.manifest.totals["read"] - int(every[:, 0].sum())
    untold = f" {missing:,} documents were dropped or failed before they were tokenized and are not shown."
    edges = [round(float(edge)) for edge in chart.edges]
    bins: list[list[object]] = [
        [f"{a:,} to {b:,}", *(int(one.counts[i]) for one in chart.series)] for i, (a, b) in enumerate(pairwise(edges))
    ]
    legend = [tag("span", tag("i", class_=f"swatch {one.role}"), one.label) for one in chart.series]
    return join(
        tag(
            "figure",
            tag("figcaption", "How many documents have how many tokens.", untold if missing else ""),
            draw_histogram(chart),
            tag("p", *legend, class_="legend"),
        ),
        table("Documents by length", ["tokens", "kept", "too short", "other drops", "of documents", "of tokens"], rows),
        details(
            "All figures of the chart",
            table("Documents in each bin", ["tokens", *(one.label for one in chart.series)], bins),
        ),
    )


def reasons(content: Content) -> Html:
    """Reasons for which documents were dropped or failed, and their places."""
    told = content.reasons()
    if not told:
        return tag("p", f"Every {content.noun.removesuffix('s')} that was read is kept.")
    totals = content.manifest.totals
    most = told[0][2].read
    rows: list[list[object]] = [
        [
            join(tag("span", reason, class_="label"), draw_bar(tally.read, most, role)),
            "failed" if role == "failed" else "dropped",
            tally.read,
            share(tally.read, totals["read"]),
            share(tally.text_bytes, totals["text_bytes"]),
        ]
        for reason, role, tally in told
    ]
    noun = content.noun
    parts = [table(f"{noun.capitalize()} that are not kept", ["reason", "kind", noun, f"of {noun}", "of text"], rows)]
    if failures := content.manifest.failures:
        shown = [
            tag("li", place(one.source, one.offset), f" {one.reason}: {one.message}")
            for one in failures[:_SHOWN_FAILURES]
        ]
        more = totals["failed"] - len(shown)
        head = f"Failures: the first {len(shown)}" + (f" of {totals['failed']:,}" if more > 0 else "")
        parts.append(details(head, tag("ul", *shown, class_="places"), open=""))
    return join(*parts)


def duplicates(content: Content) -> Html:
    """Clusters of duplicates, the largest with their members."""
    sizes = content.clusters.sizes
    if not len(sizes):
        return _NOTHING
    by_size = content.clusters.by_size()
    most = max(number for _, number in by_size)
    rows: list[list[object]] = [
        [join(tag("span", f"{size} {content.noun}", class_="label"), draw_bar(number, most, "dropped")), number]
        for size, number in by_size
    ]
    removed = int(sizes.sum()) - len(sizes)
    shown = []
    for cluster in content.clusters.largest:
        copies = [tag("li", _entry(entry)) for entry in cluster.copies]
        left = cluster.size - 1 - len(copies)
        more = [tag("li", f"and {left:,} more", class_="note")] if left > 0 else []
        shown.append(
            details(
                join(
                    f"{cluster.size:,} {content.noun}, kept: ",
                    _entry(cluster.kept) if cluster.kept else "not in the ledgers",
                ),
                tag("ul", *copies, *more, class_="places"),
            )
        )
    return join(
        tag("p", f"{removed:,} copies were removed; they belong to {len(sizes):,} {content.noun} that are kept."),
        table("Clusters by size", ["size", "clusters"], rows),
        tag("h3", "The largest clusters"),
        *shown,
    )


def contamination(content: Content) -> Html:
    """Documents that share text with evaluation sets, dropped or kept with a note."""
    matches = sorted(content.found.matches.values(), key=lambda one: (-one.kept - one.dropped, one.name))
    if not matches and not content.statuses.get(CONTAMINATED):
        return _NOTHING
    kept, dropped = sum(one.kept for one in matches), content.statuses.get(CONTAMINATED, Tally()).read
    rows: list[list[object]] = [
        [
            join(tag("span", one.name or "(other notes)", class_="label"), tag("small", f"e.g. “{one.words[:160]}”")),
            one.kept,
            one.dropped,
            one.most,
        ]
        for one in matches[:_SHOWN_SETS]
    ]
    noun = content.noun
    heads = ["evaluation set", f"{noun} kept", f"{noun} dropped", "most n-grams in one"]
    return join(
        tag(
            "p",
            f"{kept + dropped:,} {noun} share text with an evaluation set: {dropped:,} were dropped, "
            f"{kept:,} are kept. A {noun.removesuffix('s')} counts for the set of its first match.",
        ),
        table("Matches by evaluation set", heads, rows),
    )


def sources(content: Content) -> Html:
    """Tokens and text by source: files and archives, or their folders where there are many."""
    unit = size_noun(content.manifest.content.kind)
    return _tallies(content, f"Sources by {unit} kept", "source", content.sources())


def languages(content: Content) -> Html:
    """Tokens and text by language."""
    rows = content.languages()
    return _tallies(content, "Languages by tokens kept", "language", rows) if rows else _NOTHING


def _tallies(content: Content, caption: str, head: str, tallies: list[tuple[str, Tally]]) -> Html:
    most = max((tally.kept_tokens for _, tally in tallies), default=0)
    tokens = content.manifest.totals["num_tokens"]
    rows: list[list[object]] = [
        [
            join(tag("bdi", name, class_="label"), draw_bar(tally.kept_tokens, most, "kept")),
            tally.kept_tokens,
            share(tally.kept_tokens, tokens),
            tally.read,
            share(tally.kept, tally.read),
            in_mib(tally.text_bytes),
        ]
        for name, tally in tallies
    ]
    unit, read = size_noun(content.manifest.content.kind), "text read" if content.media is None else "files read"
    return table(caption, [head, f"{unit} kept", f"of {unit}", f"{content.noun} read", "kept", read], rows)


def estimate(content: Content) -> Html:
    """Figures estimated from a sample, compared with the outcome."""
    expected, manifest = content.estimate, content.manifest
    if expected is None:
        return _NOTHING
    compared, noun = _COMPARED, content.noun
    if content.media is not None:
        unit = size_noun(manifest.content.kind)
        files = {"documents": f"{noun} read", "kept": f"{noun} kept", "text bytes": "bytes of files"}
        compared = _COMPARED | files | {"num tokens": f"{unit} kept"}
    rows: list[list[object]] = [
        [compared.get(name, name), told, came, f"{told / came - 1:+.1%}" if came else "–"]
        for name, told, came in expected.against(manifest, content.seconds)
    ]
    read = f"Estimated from {in_mib(expected.sampled_bytes)} of {in_mib(expected.input_bytes)} of input."
    return join(tag("p", read), table("Estimate and outcome", ["", "estimated", "came out", "difference"], rows))


def _entry(entry: Entry) -> Html:
    kept = (entry.detail or "").partition("similarity ")[2]
    facts = [f"{entry.num_tokens:,} tokens"] if entry.num_tokens is not None else []
    facts += [f"similarity {kept}"] if kept and entry.status not in SPLITS else []
    return join(place(entry.source, entry.offset), " ", tag("span", ", ".join(facts), class_="note"))
