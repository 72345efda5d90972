"""Output files of a comparison: `scores.md`, `scores.json`, `scores.html`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.storage import write_json, write_text
from evaluation.senteval.runner.harness import Evaluated
from evaluation.tables.blocks import Block, compare
from evaluation.tables.differences import with_differences
from evaluation.tables.literature import PublishedModel, literature
from evaluation.tables.markdown import markdown
from evaluation.tables.page import page
from evaluation.tables.remarks import remarks


def write_tables(evaluated: Sequence[Evaluated], folder: Path) -> str:
    """Write all three files; return the Markdown of the encoders alone, for a terminal."""
    published = literature()
    blocks, told = _blocks(evaluated, published), remarks(evaluated, published)
    write_text(folder / "scores.md", markdown(blocks, told))
    write_text(folder / "scores.html", page(blocks, told))
    encoders = [
        {
            "encoder": one.encoder,
            "fingerprint": one.fingerprint,
            "size": one.size,
            "warnings": list(one.warnings),
            "seconds": one.seconds,
            "pretrained": one.pretrained,
            "geometry": dict(one.geometry),
            "protocols": {protocol: report.to_json() for protocol, report in one.reports.items()},
        }
        for one in evaluated
    ]
    write_json(
        folder / "scores.json",
        {
            "encoders": encoders,
            "published": [model.model_dump(mode="json") for model in published],
            "tables": [asdict(block) for block in blocks],
        },
    )
    return markdown(_blocks(evaluated, ()), remarks(evaluated, ()))


def _blocks(evaluated: Sequence[Evaluated], published: Sequence[PublishedModel]) -> tuple[Block, ...]:
    """Build the tables with their difference columns."""
    starts = {(one.encoder, ""): one.pretrained for one in evaluated}
    starts |= {(model.model, model.source): model.pretrained for model in published}
    return tuple(with_differences(block, starts) for block in compare(evaluated, published))
