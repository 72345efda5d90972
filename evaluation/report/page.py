"""The page: one HTML file without scripts, other files or network requests."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from declutr.common.storage import write_text
from declutr.evaluation.report.content import Content, bar_charts, gather, lengths_chart
from declutr.evaluation.report.content_sections import examples, media, texts
from declutr.evaluation.report.header import header
from declutr.evaluation.report.markup import Html, join, markup, policy_hash, tag
from declutr.evaluation.report.png import save_bars, save_histogram
from declutr.evaluation.report.sections import (
    contamination,
    duplicates,
    estimate,
    languages,
    lengths,
    reasons,
    sources,
)

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
