"""The page: one HTML file without scripts, other files or network requests."""

import base64
import hashlib
from importlib.resources import files

from evaluation.report.content import Content
from evaluation.report.header import header
from evaluation.report.markup import Html, join, markup, tag
from evaluation.report.sections import (
    contamination,
    duplicates,
    estimate,
    examples,
    languages,
    lengths,
    reasons,
    sources,
)
from evaluation.report.text_section import texts


def page(content: Content) -> str:
    """Renders the document. The same content gives the same text."""
    parts = {
        "lengths": ("Lengths", lengths(content) if content.texts is None else texts(content)),
        "reasons": ("What is not kept", reasons(content)),
        "duplicates": ("Duplicates", duplicates(content)),
        "contamination": ("Evaluation sets", contamination(content)),
        "sources": ("Sources", sources(content)),
        "languages": ("Languages", languages(content)),
        "examples": ("Examples", examples(content)),
        "estimate": ("Estimate", estimate(content)),
    }
    shown = {name: part for name, part in parts.items() if part[1]}
    links = [tag("a", title, href=f"#{name}") for name, (title, _) in shown.items()]
    sections = [
        tag("section", tag("h2", title, id=f"{name}-head"), body, id=name, aria_labelledby=f"{name}-head")
        for name, (title, body) in shown.items()
    ]
    title = f"Corpus report: {content.name}"
    body = tag(
        "body",
        header(content),
        tag("nav", *links, aria_label="Parts of this report"),
        tag("main", *sections),
        tag(
            "footer",
            "Made by ",
            tag("code", "declutr report"),
            " from the manifest, the ledgers and the shards of this corpus.",
        ),
    )
    return document(title, body)


def document(title: str, body: Html) -> str:
    """A page of this title and body, with our style sheet and content security policy."""
    return f"<!DOCTYPE html>\n{tag('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Html:
    """Head of the page. Its policy forbids all scripts, and every style except ours, which it names by hash."""
    style = (files("evaluation.report") / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
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
