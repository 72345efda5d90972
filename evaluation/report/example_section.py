"""Section with examples of what is kept, and of what is not."""

from declutr.evaluation.report.content import Content
from declutr.evaluation.report.examples import SHOWN_CHARACTERS, Example
from declutr.evaluation.report.markup import Html, details, join, place, tag

_NOTHING = Html("")


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
