"""Sentences that search the rest of their paragraph, before and after finished runs of `python -m benchmarks.adapt`.

    python -m benchmarks.adapt.queries --start ENCODER --work FOLDER --json OUT

The paragraphs are those of the runs' test documents, at most eight of a document; nothing of them was trained on, and
no choice was made by this measure. Intervals are over documents.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapt.references import points
from benchmarks.record import facts, parser, publish
from declutr.adaptation.config import AdaptConfig, prepare_config
from declutr.adaptation.documents import held_out_documents
from declutr.adaptation.job import load_transformer
from declutr.adaptation.measures import F64, share
from declutr.common.bootstrap import compare
from declutr.encoders.protocol import unit_rows
from declutr.encoders.transformer import TransformerEncoder

_MOST_PARAGRAPHS = 8
_SENTENCE_WORDS, _REST_WORDS = range(6, 41), 30


def main() -> None:
    """Run the command."""
    options = parser("adapt.queries", __doc__)
    options.add_argument("--start", type=Path, required=True, help="folder of the encoder that the runs started from")
    options.add_argument("--work", type=Path, default=Path("runs/adapt-benchmark"), help="folder of the runs")
    given = options.parse_args()
    start = load_transformer(str(given.start))
    runs = [_row(start, run, given.start) for run in sorted(given.work.glob("*-seed*")) if (run / "encoder").is_dir()]
    publish(facts("adapt.queries", given.commit) | {"runs": runs}, given.json)


def _row(start: TransformerEncoder, run: Path, encoder: Path) -> dict[str, Any]:
    """The difference of a run's encoder to its start, in points of recall@1."""
    source, _, seed = run.name.rpartition("-seed")
    corpus = str((run.parent / f"{source}.jsonl").absolute())
    config = prepare_config(AdaptConfig(encoder=str(encoder), corpus=[corpus]), run / "data")
    documents = held_out_documents(config, run / "data", int(seed))["test"]
    cut = [(place, *one) for place, document in enumerate(documents) for one in _paragraphs(document.text)]
    owners, queries, texts = (list(column) for column in zip(*cut, strict=True))
    before, after = (_found(one, owners, queries, texts) for one in (start, load_transformer(str(run / "encoder"))))
    found = compare(before, after, int(seed), share)
    told = {"source": source, "seed": int(seed), "queries": len(queries), "before": 100 * found.before}
    return told | points(found)


def _paragraphs(text: str) -> list[tuple[str, str]]:
    """First sentence and rest of paragraphs of a document, spread evenly."""
    found = []
    for paragraph in text.split("\n"):
        first, _, rest = re.sub(r"(?<=[a-z)][.?!])\s+", "\n", paragraph.strip(), count=1).partition("\n")
        if len(first.split()) in _SENTENCE_WORDS and len(rest.split()) >= _REST_WORDS:
            found.append((first, rest))
    places = np.linspace(0, len(found) - 1, _MOST_PARAGRAPHS).astype(int).tolist() if found else []
    return [found[place] for place in sorted(set(places))]


def _found(encoder: TransformerEncoder, owners: list[int], queries: list[str], texts: list[str]) -> F64:
    """`(n, 2)` sentences of each document whose paragraph has the highest cosine, and sentences of it."""
    scores = unit_rows(encoder.encode(queries)) @ unit_rows(encoder.encode(texts)).T
    best = (scores >= np.diagonal(scores)[:, None]).sum(axis=1) == 1
    _, rows = np.unique(owners, return_inverse=True)
    return np.stack([np.bincount(rows, best), np.bincount(rows)], axis=1).astype(np.float64)


if __name__ == "__main__":
    main()
