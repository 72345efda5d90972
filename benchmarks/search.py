"""Questions on a documentation: how often its right page is the first, or among the first ten.

    python -m benchmarks.search ENCODER DOCS QUESTIONS --json OUT

DOCS is a folder of Markdown pages, QUESTIONS a file of `query` and `source`, the path of the page below DOCS; those of
`benchmarks/questions` were written before any search. A page has the score of its best row. Rows are: its beginning,
as far as the encoder reads; passages; passages with their headings; and passages of a quarter of the tokens. Each is
scored by vectors, by the words of its texts (BM25), and by both as `declutr index --hybrid` does (cosine + IDF cosine).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import record
from declutr.embedding.passages import Cutter
from declutr.encoders.loading import load_encoder
from declutr.encoders.protocol import encode_counted, unit_rows
from declutr.evaluation.retrieval.lexicon import Lexicon

F32 = NDArray[np.float32]
_CHUNKS = 4  # of a window


def main() -> None:
    """Score all ways and write their figures."""
    parser = record.parser("search", __doc__)
    parser.add_argument("encoder")
    parser.add_argument("docs", type=Path)
    parser.add_argument("questions", type=Path)
    options = record.parse(parser)
    pages = {str(path.relative_to(options.docs)): path.read_text() for path in sorted(options.docs.rglob("*.md"))}
    questions = [json.loads(line) for line in options.questions.read_text().splitlines()]
    right = np.array([list(pages).index(question["source"]) for question in questions])
    encoder = load_encoder(options.encoder)
    queries = unit_rows(encoder.encode([question["query"] for question in questions]))
    figures: dict[str, Any] = {"pages": len(pages), "questions": len(questions), "ways": {}}
    for way, owners, texts, vectors, read in _ways(encoder, options.encoder, list(pages.values())):
        lexicon, words = Lexicon(texts), [question["query"] for question in questions]
        cosines = queries @ unit_rows(vectors).T
        scores = {"vectors": cosines, "BM25": lexicon.bm25(words), "hybrid": cosines + lexicon.idf_cosine(words)}
        ranks = {name: _ranks(score, owners, right) for name, score in scores.items()}
        figures["ways"][way] = {"rows": len(texts), "tokens_read": round(float(read), 4)} | {
            name: {f"hit@{k}": round(100 * float((rank <= k).mean()), 1) for k in (1, 10)}
            for name, rank in ranks.items()
        }
        record.progress(f"{way}: {figures['ways'][way]}")
    record.publish(figures, options)


def _ways(encoder: Any, name: str, pages: list[str]) -> Iterator[tuple[str, NDArray[np.int64], list[str], F32, float]]:
    """Name, page of each row `(rows,)`, texts, vectors `(rows, size)`, and share of the tokens that is read."""
    vectors, tokens = encode_counted(encoder, pages)
    # BM25 reads what the encoder reads: the beginning
    beginnings = [Cutter(encoder).passages(page)[0].of(page) for page in pages]
    yield "beginning", np.arange(len(pages)), beginnings, vectors, tokens[:, 1].sum() / tokens[:, 0].sum()
    short = load_encoder(name, max_tokens=encoder.max_tokens // _CHUNKS)
    for way, reader, headings in (
        ("passages", encoder, False),
        ("passages with headings", encoder, True),
        ("passages of a quarter", short, False),
    ):
        cutter = Cutter(reader, headings)
        owners, texts = _rows([[passage.of(page) for passage in cutter.passages(page)] for page in pages])
        vectors, tokens = encode_counted(reader, texts)
        yield way, owners, texts, vectors, tokens[:, 1].sum() / max(1, tokens[:, 0].sum())


def _rows(texts: list[list[str]]) -> tuple[NDArray[np.int64], list[str]]:
    """Page of each text, and all texts."""
    return np.repeat(np.arange(len(texts)), [len(row) for row in texts]), [text for row in texts for text in row]


def _ranks(scores: F32, owners: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """`(queries,)` ranks of the right pages, from 1; a tie is lost."""
    best = np.maximum.reduceat(scores, np.flatnonzero(np.diff(owners, prepend=-1)), axis=1)
    return (best >= best[np.arange(len(right)), right][:, None]).sum(axis=1)


if __name__ == "__main__":
    main()
