"""Choice of a hybrid index's weight on pairs: half of the queries choose it, the other half report it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common.bootstrap import Comparison, compare
from declutr.embedding.index import SearchIndex
from declutr.encoders.protocol import SentenceEncoder
from declutr.evaluation.retrieval.compare import MEASURES, SEED, measures
from declutr.evaluation.retrieval.pairs import PairsError, RetrievalTest, join_pairs, read_pairs

F64 = NDArray[np.float64]
WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
WORDS_ALONE = "words alone"
VECTORS_ALONE = "vectors alone"
CHOOSING = "ndcg@10"


@dataclass(frozen=True)
class WeightChoice:
    """A weight chosen on pairs.

    Attributes:
        weight: with the highest mean nDCG@10 on the development queries; of equal ones the lowest.
        development: number of queries that chose it.
        values: `(Q, 5)` values of `MEASURES` on the other queries, of the hybrid search and of each part alone.
    """

    weight: float
    development: int
    values: Mapping[str, F64]

    def differences(self) -> dict[str, Comparison]:
        """The hybrid search compared with each part alone on the queries that did not choose."""
        column = MEASURES.index(CHOOSING)
        parts = ((name, each) for name, each in self.values.items() if name != "hybrid")
        return {name: compare(each[:, column], self.values["hybrid"][:, column], SEED) for name, each in parts}


def choose_weight(index: SearchIndex, encoder: SentenceEncoder, pairs: Path) -> WeightChoice:
    """Choose the weight of a hybrid index on pairs of `query` and `text`, or of `query` and `id`, of its texts.

    Raises:
        PairsError: the file cannot be used, or names a text or an id that the index does not have.
        EmbedError: the encoder did not make the index.
    """
    index.check(encoder)
    test = _test(index, pairs)
    halves = {which: test.half(which, SEED) for which in ("development", "test")}
    if not all(half.queries for half in halves.values()):
        raise PairsError(f"--pairs {pairs}: has {len(test.queries)} queries, too few to choose a weight and report it")
    found = _measured(index, encoder, halves["development"], WEIGHTS)
    means = [each[:, MEASURES.index(CHOOSING)].mean() for each in found]
    weight = WEIGHTS[int(np.argmax(means))]
    hybrid, vectors, words = _measured(index, encoder, halves["test"], (weight, 0.0, None))
    values = {"hybrid": hybrid, VECTORS_ALONE: vectors, WORDS_ALONE: words}
    return WeightChoice(weight, len(halves["development"].queries), values)


def _test(index: SearchIndex, pairs: Path) -> RetrievalTest:
    """The pairs, with rows of the index as numbers of the texts; equal texts are all relevant."""
    rows, key = read_pairs(pairs)
    wanted = {text for _, _, text in rows}
    number: dict[str, list[int]] = {}
    for row in range(index.facts.rows):  # one at a time, because there may be millions
        stored = index.texts([row])[0]
        if (name := stored.id if key == "id" else stored.text) in wanted:
            number.setdefault(str(name), []).append(row)
    queries, relevant = join_pairs(pairs, rows, number, "the index")
    return RetrievalTest(queries, [], relevant)


def _measured(
    index: SearchIndex, encoder: SentenceEncoder, test: RetrievalTest, weights: Sequence[float | None]
) -> F64:
    """`(weights, Q, 5)` measures; weight None: words alone."""
    values = np.empty((len(weights), len(test.queries), len(MEASURES)))
    for number, (query, relevant) in enumerate(zip(test.queries, test.relevant, strict=True)):
        cosines, lexical = index.parts(index.embed(encoder, query), query)
        for place, weight in enumerate(weights):
            scores = lexical if weight is None else cosines + np.float32(weight) * lexical
            values[place, number] = measures(scores[None], [relevant])[0]
    return values


def sentences(choice: WeightChoice) -> Iterator[str]:
    """Sentences with the choice and its differences to each part."""
    yield f"weight {choice.weight:g} chosen on {choice.development:,} queries"
    for name, one in choice.differences().items():
        scores = f"{100 * one.after:.1f}, {name} {100 * one.before:.1f}"
        yield f"{CHOOSING} on {one.rows:,} other queries: {scores}, difference {one.sentence()}"
