"""The page, one HTML file without scripts, other files or network requests, and its sections on the content."""

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from declutr.common.storage import write_text
from declutr.evaluation.report.charts import Bars, draw_bar, draw_histogram
from declutr.evaluation.report.content import Content, bar_charts, gather, lengths_chart
from declutr.evaluation.report.examples import SHOWN_CHARACTERS, Example
from declutr.evaluation.report.header import header
from declutr.evaluation.report.markup import Html, details, join, markup, place, policy_hash, table, tag
from declutr.evaluation.report.png import save_bars, save_histogram
from declutr.evaluation.report.rows import media_bars, text_bars
from declutr.evaluation.report.sections import (
    contamination,
    duplicates,
    estimate,
    languages,
    lengths,
    reasons,
    sources,
)
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


REPORT = "report"
"""Default folder of the report, next to the shards."""


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Writes `report.html` and `charts/*.png` on a corpus to `output`, or to its folder `report`; returns the page.

    The same corpus with the same times of its files gives the same bytes.

    Raises:
        ShardError: files that are missing or damaged, or ledgers that contradict the manifest.
    """
    target = output or folder / REPORT
    content = gather(folder)
    if content.texts is None:  # documents, images or clips
        save_histogram(lengths_chart(content), target / "charts" / "lengths.png")
    for chart in bar_charts(content):
        save_bars(chart, target / "charts" / f"{chart.name}.png")
    path = target / "report.html"
    write_text(path, _page(content))
    return path


def _page(content: Content) -> str:
    """Renders the document. The same content gives the same text."""
    parts = {
        "lengths": ("Sizes and labels" if content.media else "Lengths", _lengths(content)),
        "reasons": ("What is not kept", reasons(content)),
        "duplicates": ("Duplicates", duplicates(content)),
        "contamination": ("Evaluation sets", contamination(content)),
        "sources": ("Sources", sources(content)),
        "languages": ("Languages", languages(content)),
        "examples": ("Examples", examples(content)),
        "estimate": ("Estimate", estimate(content)),
    }
    body = sectioned(header(content), parts, "the manifest, the ledgers and the shards of this corpus.")
    return document(f"Corpus report: {content.name}", body, pictures=content.media is not None)


def sectioned(head: Html, parts: Mapping[str, tuple[str, Html]], sources: str) -> Html:
    """The body of a report: its head, links to its parts, and the parts that are not empty, by id with their titles."""
    shown = {name: part for name, part in parts.items() if part[1]}
    links = [tag("a", title, href=f"#{name}") for name, (title, _) in shown.items()]
    sections = [
        tag("section", tag("h2", title, id=f"{name}-head"), body, id=name, aria_labelledby=f"{name}-head")
        for name, (title, body) in shown.items()
    ]
    return tag(
        "body",
        head,
        tag("nav", *links, aria_label="Parts of this report"),
        tag("main", *sections),
        tag("footer", "Made by ", tag("code", "declutr report"), f" from {sources}"),
    )


def _lengths(content: Content) -> Html:
    """The section on lengths or sizes that fits the kind of rows."""
    if content.media is not None:
        return media(content)
    return lengths(content) if content.texts is None else texts(content)


def document(title: str, body: Html, pictures: bool = False) -> str:
    """A page of this title and body, with our style sheet and content security policy.

    The policy permits images that are part of the page if there are `pictures`.
    """
    return f"<!DOCTYPE html>\n{tag('html', _head(title, pictures), body, lang='en')}\n"


def _head(title: str, pictures: bool) -> Html:
    """Head of the page. Its policy forbids all scripts, and every style except ours, which it names by hash."""
    style = (files(__package__) / "style.css").read_text(encoding="utf-8")
    images = "img-src data:; " if pictures else ""
    policy = f"default-src 'none'; {images}style-src {policy_hash(style)}; base-uri 'none'; form-action 'none'"
    return join(
        Html("<head>"),
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", markup(title)),
        Html(f"<style>{style}</style>"),
        Html("</head>"),
    )
