"""The answer to "is this corpus worth training on", from its counts and the spans that a run would read."""

from declutr.common.bootstrap import MIN_ROWS
from declutr.evaluation.report.content import Content
from declutr.evaluation.report.markup import share

_BATCH = 16
"""Documents of the paper's batch, and the default."""


def readiness(content: Content) -> str:
    """One sentence: yes, or what to change first."""
    obstacles, totals, read = _obstacles(content), content.manifest.totals, content.coverage
    if obstacles:
        return f"Worth training on? Not yet: {'; '.join(obstacles)}."
    about = ""
    if read is not None and content.manifest.content.kind == "documents":
        about = (
            f", of which three passes read {share(read.read_tokens, read.num_tokens)} of the tokens "
            f"({read.pass_tokens / read.num_documents:,.0f} of {read.num_tokens / read.num_documents:,.0f} tokens of a "
            "document a pass)"
        )
    return (
        f"Worth training on? Nothing here speaks against it: {totals['kept_train']:,} training {content.noun}{about}, "
        f"and {totals['kept_held_out']:,} held out to measure the result. `declutr train CONFIG --plan` estimates time "
        "and memory."
    )


def _obstacles(content: Content) -> list[str]:
    """Reasons not to train yet, each with its remedy."""
    totals, found = content.manifest.totals, []
    if totals["kept_train"] < _BATCH:
        found.append(f"{totals['kept_train']:,} training {content.noun} are less than a batch of {_BATCH}; add more")
    if totals["kept_held_out"] < 2 * MIN_ROWS:
        found.append(
            f"{totals['kept_held_out']:,} held-out {content.noun} do not show whether training helped, which "
            f"needs {2 * MIN_ROWS}; increase validation_fraction or add {content.noun}"
        )
    kept, text_bytes = content.kept_tally.text_bytes, totals["text_bytes"]
    if 2 * kept < text_bytes and (reasons := content.reasons()):
        part = "text" if content.media is None else "bytes"
        found.append(f"only {share(kept, text_bytes)} of the {part} is kept, most is lost as {reasons[0][0]}")
    return found
