"""Section on images and clips: sizes or lengths, labels, changes."""

from itertools import pairwise

from declutr.evaluation.report.content import Content, lengths_chart
from declutr.evaluation.report.markup import Html, details, join, table, tag
from declutr.evaluation.report.media import media_bars
from declutr.evaluation.report.svg import draw_bar, draw_histogram
from declutr.pipeline.shards.content import size_noun


def media(content: Content) -> Html:
    """Histogram of sizes or lengths, and tables of labels, sizes and changes; empty for texts."""
    found = content.media
    if found is None:
        return Html("")
    noun, unit = content.noun, size_noun(content.manifest.content.kind)
    chart = lengths_chart(content)
    edges = [round(float(edge)) for edge in chart.edges]
    bins: list[list[object]] = [
        [f"{a:,} to {b:,}", *(int(one.counts[i]) for one in chart.series)] for i, (a, b) in enumerate(pairwise(edges))
    ]
    heads = [unit, *(one.label for one in chart.series)]
    parts = [
        tag("figure", tag("figcaption", f"Number of {noun} by {unit}."), draw_histogram(chart)),
        details("All figures of the chart", table(f"{noun.capitalize()} in each bin", heads, bins)),
    ]
    if found.longest_frames:
        told = (
            f"All clips have {found.seconds / 60:,.1f} minutes; the longest clip has {found.longest_frames:,} frames."
        )
        parts.insert(0, tag("p", told))
    for bars in media_bars(found, content.manifest):
        most = max((bar.value for bar in bars.bars), default=0)
        rows: list[list[object]] = [
            [join(tag("bdi", bar.label, class_="label"), draw_bar(bar.value, most, bar.role)), bar.shown]
            for bar in bars.bars
        ]
        if rows:
            parts.append(table(bars.title, [bars.name, "number"], rows))
    return join(*parts)
