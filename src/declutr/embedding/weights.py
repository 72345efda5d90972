"""The weight of the words of a hybrid index, chosen on pairs: half of the queries choose it, the others report it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.bootstrap import F64, compare, grouped, share
from declutr.common.errors import DataError
from declutr.embedding.index import SearchIndex
from declutr.encoders.protocol import SentenceEncoder
from declutr.evaluation.retrieval.pairs import RetrievalTest, join_pairs, read_pairs

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)  # 0: words may help nothing
CHOOSING = "ndcg@10"


@dataclass(frozen=True)
class WeightChoice:
    """A weight chosen on pairs."""

    weight: float  # the one with the highest mean nDCG@10 on the development queries; of equal ones the lowest
    development: int  # number of queries that chose it
    # `(Q, 5)` values of `MEASURES` on the other queries, of the hybrid search and of each part alone.
    values: Mapping[str, F64]
    answers: NDArray[np.int64]  # `(Q,)` number of the answers of each of the other queries


def choose_weight(index: SearchIndex, encoder: SentenceEncoder, pairs: Path) -> WeightChoice:
    """Choose the weight of a hybrid index on pairs of `query` and `text`, or of `query` and `id`, of its texts."""
    from declutr.evaluation.retrieval.compare import MEASURES, SEED  # loads torch, as two more below

    index.check(encoder)
    test = _test(index, pairs)
    # a weight looks too good on the queries that chose it
    halves = {which: test.part(which, SEED) for which in ("development", "test")}
    if not all(half.queries for half in halves.values()):
        raise DataError(f"--pairs {pairs}: has {len(test.queries)} queries, too few to choose a weight and report it")
    by_weight = _measured(index, encoder, halves["development"], WEIGHTS)
    means = [measured[:, MEASURES.index(CHOOSING)].mean() for measured in by_weight]
    weight = WEIGHTS[int(np.argmax(means))]
    hybrid, vectors, words = _measured(index, encoder, halves["test"], (weight, 0.0, None))  # None: words alone
    values = {"hybrid": hybrid, "vectors alone": vectors, "words alone": words}
    return WeightChoice(weight, len(halves["development"].queries), values, halves["test"].answers)


def _test(index: SearchIndex, pairs: Path) -> RetrievalTest:
    """The pairs, with documents of the index as numbers of the texts; equal texts are all relevant."""
    rows, key = read_pairs(pairs)
    targets = {text for _, _, text in rows}
    number: dict[str, list[int]] = {}
    for row in range(index.facts.rows):  # one at a time, because there may be millions
        stored = index.texts([row])[0]
        if (name := stored.id if key == "id" else stored.text) in targets:
            number.setdefault(str(name), []).append(index.document(row))
    return join_pairs(
        pairs, rows, {name: list(dict.fromkeys(places)) for name, places in number.items()}, [], "the index"
    )


def _measured(
    index: SearchIndex, encoder: SentenceEncoder, test: RetrievalTest, weights: Sequence[float | None]
) -> F64:
    """`(weights, Q, 5)` measures; weight None: words alone."""
    from declutr.evaluation.retrieval.compare import MEASURES, measures

    values = np.empty((len(weights), len(test.queries), len(MEASURES)))
    for number, (query, relevant) in enumerate(zip(test.queries, test.relevant, strict=True)):
        cosines, lexical = index.parts(index.embed(encoder, query), query)
        for place, weight in enumerate(weights):
            scores = lexical if weight is None else cosines + np.float32(weight) * lexical
            values[place, number] = measures(index.by_document(scores)[None], [relevant])[0]
    return values


def sentences(choice: WeightChoice) -> Iterator[str]:
    """Sentences with the choice, and the differences to each part alone on the queries that did not choose."""
    from declutr.evaluation.retrieval.compare import MEASURES, SEED

    yield f"weight {choice.weight:g} chosen on {choice.development:,} queries"
    column = MEASURES.index(CHOOSING)
    rows = {name: grouped(scores[:, column], choice.answers) for name, scores in choice.values.items()}
    hybrid = rows.pop("hybrid")
    for name, part in rows.items():
        difference = compare(part, hybrid, SEED, share)
        scores = f"{100 * difference.after:.1f}, {name} {100 * difference.before:.1f}"
        queries = f"{len(choice.answers):,} other queries with {difference.rows:,} different answers"
        yield f"{CHOOSING} on {queries}: {scores}, difference {difference.sentence('answers')}"
