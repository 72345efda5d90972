"""Sections on the content: examples of what is kept and what is not, images and clips, rows of short texts."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from declutr.evaluation.report.charts import Bars
from declutr.evaluation.report.content import Content, lengths_chart
from declutr.evaluation.report.examples import SHOWN_CHARACTERS, Example
from declutr.evaluation.report.markup import Html, details, join, place, table, tag
from declutr.evaluation.report.media import media_bars
from declutr.evaluation.report.svg import draw_bar, draw_histogram
from declutr.evaluation.report.text_survey import text_bars
from declutr.pipeline.shards.content import size_noun

_NOTHING = Html("")
_QUANTILES = (0.5, 0.95, 0.99, 1.0)


def examples(content: Content) -> Html:
    """The beginnings of some documents that are kept and of some that are not."""
    if content.media is not None:
        intro = (
            "Drawn by the corpus's seed. Clips are shown by their energies, with time to the right and low bands below."
        )
        kept = tag("div", *(_example(example) for example in content.kept), class_="pictures")
        parts = [tag("p", intro), kept]
    else:
        parts = _texts(content)
    for reason, _, tally in content.reasons():
        shown = [_example(example) for example in content.rejected.get(reason, [])]
        parts.append(details(join("Not kept: ", tag("strong", reason), f" ({tally.read:,})"), *shown))
    if content.media is None and any(example.text is None for some in content.rejected.values() for example in some):
        parts.append(
            tag(
                "p",
                f"Texts of dropped {content.noun} exist only if prepared with ",
                tag("code", "write_rejected: true"),
                ".",
                class_="note",
            )
        )
    return join(*parts)


def _texts(content: Content) -> list[Html]:
    """The beginnings of some texts that are kept."""
    return [
        tag(
            "p",
            f"The first {SHOWN_CHARACTERS} characters at most, drawn by the corpus's seed. Characters that would steer "
            "the page are shown as their code points.",
        ),
        tag("h3", "Kept, as the trainer sees them"),
        *(_example(example) for example in content.kept),
    ]


def _example(example: Example) -> Html:
    if example.picture is not None:
        named = example.text or "without a label"
        caption = tag("figcaption", tag("bdi", named), tag("br"), place(example.source, example.offset))
        return tag("figure", tag("img", src=Html(example.picture), alt=named), caption)
    facts = [f"{example.num_tokens:,} tokens"] if example.num_tokens is not None else []
    facts += [f"{example.text_bytes:,} bytes"] if example.text_bytes else []
    head = tag("p", place(example.source, example.offset), tag("span", ", ".join(facts), class_="note"), class_="where")
    detail = tag("p", example.detail, class_="note") if example.detail else _NOTHING
    text = tag("blockquote", example.text, dir="auto") if example.text else _NOTHING
    return tag("article", head, detail, text)


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
    return join(*parts, *_bar_tables(media_bars(found, content.manifest), "bdi"))


def texts(content: Content) -> Html:
    """Tables of the rows' texts; empty for documents."""
    found = content.texts
    if found is None:
        return Html("")
    rows: list[list[object]] = [
        [role, lengths.num_texts, f"{lengths.mean:.1f}", *(lengths.quantile(part) for part in _QUANTILES)]
        for role, lengths in found.lengths.items()
    ]
    heads = ["text", "number", "mean", "median", "95%", "99%", "longest"]
    parts = [
        tag(
            "p",
            "Tokens of the kept texts, without special tokens. An objective cuts texts longer than its ",
            tag("code", "max_tokens"),
            ".",
        ),
        table("Lengths of texts in tokens", heads, rows),
    ]
    return join(*parts, *_bar_tables(text_bars(found, content.manifest.labels), "span"))


def _bar_tables(charts: Iterable[Bars], element: str) -> Iterator[Html]:
    """A table of each chart that has bars; `element` holds a bar's label, `bdi` for one that the corpus names."""
    for chart in charts:
        most = max((bar.value for bar in chart.bars), default=0)
        rows: list[list[object]] = [
            [join(tag(element, bar.label, class_="label"), draw_bar(bar.value, most, bar.role)), bar.shown]
            for bar in chart.bars
        ]
        if rows:
            yield table(chart.title, [chart.name, "number"], rows)
