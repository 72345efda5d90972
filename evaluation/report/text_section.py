"""Section on rows of short texts: lengths, hypotheses per premise, labels."""

from declutr.evaluation.report.content import Content
from declutr.evaluation.report.markup import Html, join, table, tag
from declutr.evaluation.report.svg import draw_bar
from declutr.evaluation.report.text_survey import text_bars

_QUANTILES = (0.5, 0.95, 0.99, 1.0)


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
    for chart in text_bars(found, content.manifest.labels):
        most = max((bar.value for bar in chart.bars), default=0)
        bars: list[list[object]] = [
            [join(tag("span", bar.label, class_="label"), draw_bar(bar.value, most, bar.role)), bar.shown]
            for bar in chart.bars
        ]
        if bars:
            parts.append(table(chart.title, [chart.name, "number"], bars))
    return join(*parts)
