"""Hybrid search compared with each part alone, on three kinds of queries, through the commands `embed` and `index`.

    python -m benchmarks.evaluate.hybrid ENCODER --corpus FOLDER --work FOLDER --json OUT

- papers: sentences of an abstract search the passages of their paper without the abstract (acl-papers);
- titles: the title of a standard, from its file name, searches its passages (rust-rfcs, swift-evolution,
  kubernetes-keps);
- questions: a paragraph that is a question searches the paragraph after it (python-peps, rust-rfcs, ethereum-eips).

A query's relevant texts are all passages of its document, or the answer. A passage has 60 words; at most eight of a
document, spread evenly. The weight is chosen on half of the queries and reported on the other half, with 95% paired
intervals. int8 is compared with float32 on the same texts.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import facts, parser, publish
from declutr.common.bootstrap import compare
from declutr.embedding.build import VECTORS_ALONE, WORDS_ALONE, WeightChoice, build_index, choose_weight
from declutr.embedding.index import SearchIndex
from declutr.embedding.job import embed
from declutr.encoders.loading import load_encoder
from declutr.evaluation.retrieval.compare import MEASURES, SEED
from declutr.evaluation.retrieval.lexicon import LexicalKind

_PASSAGE_WORDS, _MOST_PASSAGES, _MOST_DOCUMENTS = 60, 8, 500
_SENTENCE_WORDS = range(8, 41)
_SENTENCE_END = re.compile(r"(?<=[a-z)][.?!])\s+(?=[A-Z])")
_KINDS: tuple[LexicalKind, ...] = ("idf", "bm25")

Row = tuple[list[str], list[str]]
"""Queries, and the texts that are relevant to each of them."""


def main() -> None:
    """Run the command."""
    options = parser("evaluate.hybrid", __doc__)
    options.add_argument("encoder", help="as `declutr embed` takes it")
    options.add_argument("--corpus", type=Path, required=True, help="folder of the corpus files (.jsonl.gz)")
    options.add_argument("--work", type=Path, default=Path("runs/hybrid-benchmark"), help="folder for embeddings")
    given = options.parse_args()
    sources: dict[str, Callable[[Path], Iterator[Row]]] = {
        "papers": _papers,
        "titles": _titles,
        "questions": _questions,
    }
    rows = [_measured(name, list(read(given.corpus)), given.encoder, given.work) for name, read in sources.items()]
    publish(facts("evaluate.hybrid", given.commit) | {"encoder": given.encoder, "rows": rows}, given.json)


def _measured(name: str, rows: list[Row], encoder: str, work: Path) -> dict[str, Any]:
    work.mkdir(parents=True, exist_ok=True)
    texts = list(dict.fromkeys(text for _, found in rows for text in found))
    pairs = [{"query": query, "text": text} for queries, found in rows for query in queries for text in found]
    _write(work / f"{name}.jsonl", [{"text": text} for text in texts])
    _write(work / f"{name}-pairs.jsonl", pairs)
    output = work / f"{name}.npy"
    embed(encoder, str(work / f"{name}.jsonl"), output, workers=0)
    loaded = load_encoder(encoder, device="cpu")
    told: dict[str, Any] = {"source": name, "texts": len(texts), "queries": len({pair["query"] for pair in pairs})}
    for kind in _KINDS:
        chosen: list[WeightChoice] = []

        def choose(index: SearchIndex, chosen: list[WeightChoice] = chosen) -> WeightChoice:
            chosen.append(choose_weight(index, loaded, work / f"{name}-pairs.jsonl"))
            return chosen[0]

        for dtype in ("float32", "int8") if kind == "idf" else ("float32",):
            folder = work / f"{name}-{kind}-{dtype}"
            made = build_index(output, folder, None, dtype, kind, choose if dtype == "float32" else 1.0)
            if made.recall is not None:
                told["int8"] = {
                    "recall@10": made.recall,
                    "bytes": (folder / "vectors.npy").stat().st_size,
                    "float32_bytes": (work / f"{name}-idf-float32" / "vectors.npy").stat().st_size,
                }
        told[kind] = _row(chosen[0])
    return told


def _row(choice: WeightChoice) -> dict[str, Any]:
    found: dict[str, Any] = {"weight": choice.weight, "chosen_on": choice.development}
    found["reported_on"] = len(choice.values["hybrid"])
    firsts = {name: (each[:, MEASURES.index("mrr")] == 1).astype(np.float64) for name, each in choice.values.items()}
    columns = {"hit@1": firsts}
    for measure in ("mrr", "ndcg@10"):
        columns[measure] = {name: each[:, MEASURES.index(measure)] for name, each in choice.values.items()}
    for measure, values in columns.items():
        found[measure] = {name: 100 * float(each.mean()) for name, each in values.items()}
        for name in (VECTORS_ALONE, WORDS_ALONE):
            one = compare(values[name], values["hybrid"], SEED)
            low, high = one.interval or (np.nan, np.nan)
            found[measure][f"hybrid minus {name}"] = [100 * one.difference, 100 * low, 100 * high]
    return found


def _papers(corpus: Path) -> Iterator[Row]:
    for record in _documents(corpus, "acl-papers"):
        abstract, _, body = record["text"].partition("\n\nIntroduction\n\n")
        sentences = [
            one for one in _SENTENCE_END.split(" ".join(abstract.split())) if len(one.split()) in _SENTENCE_WORDS
        ]
        passages = _passages(body)
        if len(passages) == _MOST_PASSAGES and sentences:
            yield sentences[:3], passages


def _titles(corpus: Path) -> Iterator[Row]:
    for source in ("rust-rfcs", "swift-evolution", "kubernetes-keps"):
        for record in _documents(corpus, source):
            name = record["id"].split("/")[-1]
            name = record["id"].split("/")[-2] if name.lower() in ("readme", "template") else name
            title = re.sub(r"[-_]", " ", re.sub(r"^\d+-", "", name))
            passages = _passages(record["text"].partition("\n\n")[2])
            if len(passages) == _MOST_PASSAGES and len(title.split()) > 1:
                yield [title], passages


def _questions(corpus: Path) -> Iterator[Row]:
    for source in ("python-peps", "rust-rfcs", "ethereum-eips"):
        for record in _documents(corpus, source, most=10**6):
            paragraphs = [" ".join(part.split()) for part in record["text"].split("\n\n")]
            for question, answer in pairwise(paragraphs):
                if question.endswith("?") and 4 <= len(question.split()) <= 30 and len(answer.split()) >= 20:
                    yield [question], [" ".join(answer.split()[: 2 * _PASSAGE_WORDS])]


def _passages(text: str) -> list[str]:
    """At most eight passages, spread evenly over paragraphs of ten words and more."""
    words = [word for part in text.split("\n\n") if len(part.split()) >= 10 for word in part.split()]
    if len(words) < _PASSAGE_WORDS:
        return []
    starts = np.arange(len(words) // _PASSAGE_WORDS) * _PASSAGE_WORDS
    places = np.unique(np.linspace(0, len(starts) - 1, _MOST_PASSAGES).round().astype(np.int64))
    return [" ".join(words[start : start + _PASSAGE_WORDS]) for start in starts[places].tolist()]


def _documents(corpus: Path, source: str, most: int = _MOST_DOCUMENTS) -> Iterator[dict[str, str]]:
    with gzip.open(corpus / f"{source}.jsonl.gz", "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream):
            if number == most:
                return
            yield json.loads(line)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
