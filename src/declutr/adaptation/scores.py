"""Scores of a candidate on every measure of a split, its general losses, the choice by scores, and the verdict.

Legend: n documents, P passages, Q queries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from declutr.adaptation.config import FAR_TOKENS, LONG_TOKENS
from declutr.adaptation.measures import F32, F64, Passages, share
from declutr.common.bootstrap import MIN_CHANGED, MIN_ROWS, Comparison, Statistic, compare, mean, spearman
from declutr.common.storage import hash_json
from declutr.encoders.protocol import unit_rows
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.retrieval.compare import general_sentences, score_encoder, score_lexical, stsb_values
from declutr.evaluation.retrieval.lexicon import Lexicon
from declutr.evaluation.retrieval.pairs import RetrievalTest

DISTANT, HEADINGS, PAIRS = "distant", "headings", "pairs"
MEANING = {
    DISTANT: "recall@1 of a passage that searches another one of its document, at least 96 tokens away",
    HEADINGS: "recall@1 of a title or heading that searches its document",
    PAIRS: "recall@1 of your queries",
}
STATISTICS: dict[str, Statistic] = {DISTANT: mean, HEADINGS: share, PAIRS: mean}
Values = dict[str, F64]
"""Values of each row by measure: `(n,)` distant, `(n, 2)` headings, `(Q,)` pairs."""


@dataclass(frozen=True)
class TestSet:
    """Passages, headings and pairs on which a split is scored.

    Attributes:
        passages: of its documents.
        pairs: all of the user's pairs, if there are any.
        mine: numbers of the queries of this split.
        recalls: `(Q,)` recall@1 of all queries, alone and with the IDF cosine, by encoder. Both splits share it,
            because their queries search the same texts.
    """

    passages: Passages
    pairs: RetrievalTest | None = None
    mine: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    recalls: dict[str, list[F64]] = field(default_factory=dict)
    _embedded: dict[str, tuple[F32, F32]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the primary measure: queries with pairs, else documents with distant passages."""
        return len(self.mine) if self.pairs else int(self.passages.scorable.sum())

    @cached_property
    def digest(self) -> str:
        """Hash of the passages, and of the queries of this split with their texts."""
        pairs, places = self.pairs, self.mine.tolist()
        queries = pairs and [[pairs.queries[place], pairs.relevant[place]] for place in places]
        return hash_json([self.passages.texts, queries, pairs and pairs.texts])

    @cached_property
    def lexicon(self) -> Lexicon:
        """Words of the passages."""
        return Lexicon(self.passages.texts)

    @cached_property
    def pairs_lexicon(self) -> Lexicon:
        """Words of the texts that the pairs search."""
        return Lexicon(self.pairs.texts if self.pairs else [])

    @cached_property
    def idf(self) -> tuple[F32, F32]:
        """IDF cosines of passages with passages, and of headings with passages."""
        return self._lexical(self.lexicon.idf_cosine)

    def lexical(self) -> dict[str, Values]:
        """Values of BM25 and of the IDF cosine."""
        bm25 = self._values(*self._lexical(self.lexicon.bm25))
        idf = self._values(*self.idf)
        if self.pairs is not None:
            bm25[PAIRS], idf[PAIRS] = self._recalls(None)
        return {"BM25": bm25, "IDF cosine": idf}

    def encoder(self, encoder: TransformerEncoder, with_idf: bool = False) -> Values:
        """Values of an encoder, with the IDF cosines added to its own on request."""
        values = self._values(*self._cosines(encoder, with_idf))
        if self.pairs is not None:
            values[PAIRS] = self._recalls(encoder)[int(with_idf)]
        return values

    def nearest(self, encoder: TransformerEncoder) -> NDArray[np.int64]:
        """`(P,)` passage of another document or far away in the same one that is nearest to each passage."""
        scores, _ = self._cosines(encoder, with_idf=False)
        owners, starts = self.passages.owners, self.passages.starts
        near = (owners[:, None] == owners) & (np.abs(starts[:, None] - starts) < FAR_TOKENS)
        places: NDArray[np.int64] = np.where(near, -np.inf, scores).argmax(axis=1)
        return places

    def _cosines(self, encoder: TransformerEncoder, with_idf: bool) -> tuple[F32, F32]:
        rows, queries = self._rows(encoder)
        passages, headings = rows @ rows.T, queries @ rows.T
        if with_idf:
            passages, headings = passages + self.idf[0], headings + self.idf[1]
        return passages, headings

    def _rows(self, encoder: TransformerEncoder) -> tuple[F32, F32]:
        """Embeddings of length 1 of passages and headings, computed once for each encoder."""
        if encoder.fingerprint not in self._embedded:
            rows = unit_rows(encoder.embed_ids(self.passages.ids))
            self._embedded[encoder.fingerprint] = rows, unit_rows(encoder.encode(self.passages.queries))
        return self._embedded[encoder.fingerprint]

    def _recalls(self, encoder: TransformerEncoder | None) -> list[F64]:
        """recall@1 of the split's queries: alone and with the IDF cosine; without an encoder of BM25 and the cosine."""
        assert self.pairs is not None
        key = encoder.fingerprint if encoder else "lexical"
        if key not in self.recalls:
            words = self.pairs_lexicon
            rows = score_encoder(self.pairs, encoder, words) if encoder else score_lexical(self.pairs, words)
            self.recalls[key] = [row.values[:, 0] for row in rows]
        return [values[self.mine] for values in self.recalls[key]]

    def _values(self, passages: F32, headings: F32) -> Values:
        values = {DISTANT: self.passages.distant(passages)}
        if self.passages.queries:
            values[HEADINGS] = self.passages.headings(headings)
        return values

    def _lexical(self, scores: Callable[[Sequence[str]], F32]) -> tuple[F32, F32]:
        return scores(self.passages.texts), scores(self.passages.queries)


def compared(before: Values, after: Values, seed: int) -> dict[str, Comparison]:
    """Differences of two candidates by measure; documents without headings are no rows of that measure."""
    comparisons = {}
    for name in (name for name in before if name in after):
        rows = before[name][:, 1] > 0 if name == HEADINGS else slice(None)
        comparisons[name] = compare(before[name][rows], after[name][rows], seed, STATISTICS[name])
    return comparisons


def compare_stsb(before: TransformerEncoder, after: TransformerEncoder, folder: Path, seed: int) -> Comparison:
    """Spearman correlations of both encoders on STS-B's test set, and the interval of their difference over pairs.

    Raises:
        DataError: the file is missing or damaged.
    """
    return compare(stsb_values(before, folder), stsb_values(after, folder), seed, spearman)


def moved(before: TransformerEncoder, after: TransformerEncoder) -> float:
    """Mean absolute change of the cosines between any two of some general sentences."""
    sentences = general_sentences()
    tables = [
        rows @ rows.T
        for rows in (unit_rows(encoder.encode(sentences).astype(np.float64)) for encoder in (before, after))
    ]
    pairs = np.triu_indices(len(sentences), 1)
    return float(np.abs(tables[1] - tables[0])[pairs].mean())


Outcome = Literal["better", "no measurable difference", "worse", "too few documents to tell"]
_POINT = 0.01


def choose(order: Sequence[str], development: dict[str, Values], primary: str, seed: int) -> str:
    """The cheapest candidate that no dearer one measurably exceeds on development rows.

    Args:
        order: candidates from the cheapest to the dearest.
        development: their values.
        primary: the measure that decides.
        seed: of the intervals.
    """
    for place, name in enumerate(order):
        comparisons = [
            compare(development[name][primary], development[other][primary], seed, STATISTICS[primary])
            for other in order[place + 1 :]
        ]
        if not any(comparison.measurable and comparison.difference > 0 for comparison in comparisons):
            return name
    raise ValueError("there is no candidate")


@dataclass(frozen=True)
class Verdict:
    """Comparison of a candidate with the start on test rows.

    Attributes:
        outcome: the verdict.
        comparison: start and candidate by the primary measure.
    """

    outcome: Outcome
    comparison: Comparison

    @property
    def rows_needed(self) -> int | None:
        """Rows with which a difference of one point would be measurable, N (half width / 1 point)^2; None: unknown."""
        interval = self.comparison.interval
        if interval is None:
            return None
        return round(self.comparison.rows * ((interval[1] - interval[0]) / 2 / _POINT) ** 2)

    def sentence(self, rows: str) -> str:
        """The verdict with its figures.

        Args:
            rows: what the rows are, such as documents.
        """
        comparison = self.comparison
        if comparison.interval is None:
            long = f" of {LONG_TOKENS} tokens or more" if rows == "documents" else ""
            return f"{self.outcome}: {comparison.rows} test {rows}{long}, an interval needs at least {MIN_ROWS}"
        low, high = (100 * end for end in comparison.interval)
        text = (
            f"{self.outcome}: {100 * comparison.before:.1f} before, {100 * comparison.after:.1f} after, difference "
            f"{100 * comparison.difference:+.1f} points (95% interval {low:+.1f} to {high:+.1f}, {comparison.rows:,} "
            f"test {rows})"
        )
        if comparison.few_changed:
            text += f"; {rows} that differ: {comparison.changed}, and a difference needs {MIN_CHANGED}"
        if low <= 0 <= high:
            text += f"; a difference of one point would need about {self.rows_needed:,} test {rows}"
        return text


def judge(before: Values, after: Values, primary: str, seed: int) -> Verdict:
    """The verdict on a candidate against the start, by the primary measure."""
    comparison = compare(before[primary], after[primary], seed, STATISTICS[primary])
    if comparison.interval is None:
        return Verdict("too few documents to tell", comparison)
    if not comparison.measurable:
        return Verdict("no measurable difference", comparison)
    return Verdict("better" if comparison.difference > 0 else "worse", comparison)
