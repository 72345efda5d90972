"""`declutr evaluate --pairs`: encoders and lexical baselines on a retrieval test; and encoders on STS-B's test set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from declutr.common.bootstrap import MIN_ROWS, Comparison, compare, grouped, paired_interval, share
from declutr.common.console.logs import get_logger
from declutr.common.errors import EncoderError
from declutr.common.storage import write_json, write_text
from declutr.encoders.exported import OnnxEncoder
from declutr.encoders.protocol import CutEncoder, SentenceEncoder, in_role, unit_rows
from declutr.encoders.transformer import TransformerEncoder
from declutr.evaluation.retrieval.lexicon import NAMES, Lexicon
from declutr.evaluation.retrieval.pairs import RetrievalTest
from declutr.trainer.metrics.judged_pairs import STSB_TEST, judged_cosines, read_pairs
from declutr.trainer.objectives.scores import ahead

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
CUTOFFS = (1, 5, 10)
MEASURES = (*(f"recall@{k}" for k in CUTOFFS), "mrr", "ndcg@10")


def measures(scores: NDArray[np.floating], relevant: Sequence[Sequence[int]]) -> F64:
    """`(Q, 5)` values of `MEASURES` by `(Q, G)` scores; of equal scores the mean over all orders of their texts.

    recall@k: share of the relevant texts among the first k. mrr: 1 / position of the first relevant text. ndcg@10:
    sum of 1 / log2(1 + position) over the relevant texts among the first 10, divided by its largest possible value
    (Järvelin and Kekäläinen 2002). Each query has a relevant text at least.
    """
    if np.isnan(scores).any():  # no score exceeds NaN, so that its text would be the first
        raise EncoderError("an embedding is not finite, so that texts have no order")
    rows = np.empty((len(relevant), len(MEASURES)))
    for row, (values, targets) in enumerate(zip(scores, relevant, strict=True)):
        own = np.sort(values[list(targets)])[::-1]  # the highest first, because place 0 is the one of `_first`
        before = ahead(values[None], own, tie=0.0).astype(np.int64)
        ties = ahead(values[None], own, tie=1.0).astype(np.int64) - before  # texts with this score, itself included
        # a text is at each position of its ties equally often
        shares = [float((np.clip(k - before, 0, ties) / ties).mean()) for k in CUTOFFS]
        gains = np.array([_gains(first, tied) for first, tied in zip(before, ties, strict=True)])
        best = float((1 / np.log2(1 + np.arange(1, min(len(own), 10) + 1))).sum())
        first = _first(int(before[0]), int(ties[0]), int((own == own[0]).sum()))
        rows[row] = [*shares, first, float(gains[gains > 0].sum()) / best]
    return rows


def _gains(before: int, ties: int) -> float:
    """Mean of 1 / log2(1 + position), 0 beyond 10, over the positions behind `before` texts."""
    return float((1 / np.log2(1 + np.arange(before + 1, min(before + ties, 10) + 1))).sum()) / ties


def _first(before: int, ties: int, relevant: int) -> float:
    """Mean of 1 / position of the first of `relevant` texts among `ties`, over all orders of these."""
    places = np.arange(ties - relevant + 1)
    later = np.cumprod(np.concatenate([[1.0], (ties - places[:-1] - relevant) / (ties - places[:-1])]))
    return float((later * relevant / (ties - places) / (before + 1 + places)).sum())


BM25, IDF = NAMES["bm25"], NAMES["idf"]
_COLLAPSED = 0.999  # mean cosine of any two texts above which an encoder tells them no longer apart in float32's noise
_CHUNK_QUERIES = 512  # each has a score for every text in memory
SEED = 0  # seed of the bootstrap: the same file gives the same intervals


@dataclass(frozen=True)
class RetrievalScores:
    """One row of the table."""

    name: str  # of the encoder or baseline
    values: F64  # `(Q, 5)` of each query, in the order of `MEASURES`
    answers: NDArray[np.int64]  # `(Q,)` of `RetrievalTest`

    def facts(self) -> dict[str, Any]:
        """Mean and 95% interval of each measure; the interval is None for fewer than `MIN_ROWS` answers."""
        facts = {}
        for name, column in zip(MEASURES, self.values.T, strict=True):
            rows = grouped(column, self.answers)  # queries of one answer are right or wrong together
            # the interval of a score is that of its difference to 0
            zeros = grouped(np.zeros_like(column), self.answers)
            interval = paired_interval(zeros, rows, SEED, share) if len(rows) >= MIN_ROWS else None
            facts[name] = {"value": float(column.mean()), "interval": interval}
        return facts


def embed_windows(encoder: SentenceEncoder, texts: Sequence[str]) -> tuple[F32, NDArray[np.int64]]:
    """Unit embeddings of the windows of texts, `(n, D)`, and the number of the text of each, ascending.

    A text that is longer than the encoder reads has several windows; others have one.
    """
    whole = encoder.whole if isinstance(encoder, CutEncoder) else encoder
    if isinstance(whole, TransformerEncoder | OnnxEncoder):
        rows, owners = whole.windows(texts)
        embeddings = whole.embed_ids(rows)
        if isinstance(whole, TransformerEncoder) and whole.unpooled:
            first = np.flatnonzero(np.diff(owners, prepend=-1))  # only the first window of a text has the prompt
            embeddings[first] = whole.embed_ids([rows[place] for place in first], whole.unpooled)
        embeddings = embeddings[:, : encoder.size]
    else:
        embeddings, owners = encoder.encode(texts), np.arange(len(texts))
    return unit_rows(embeddings), owners


def score_lexical(test: RetrievalTest, lexicon: Lexicon) -> list[RetrievalScores]:
    """The rows of the baselines."""
    return [
        _by_chunks(BM25, test, lambda part: lexicon.bm25(test.queries[part])),
        _by_chunks(IDF, test, lambda part: lexicon.idf_cosine(test.queries[part])),
    ]


def score_encoder(
    test: RetrievalTest,
    encoder: SentenceEncoder,
    lexicon: Lexicon,
    sizes: Sequence[int] = (),  # of the embedding, each a row, alone
    weights: Sequence[float] = (1.0,),  # of the IDF cosine, each a row
) -> list[RetrievalScores]:
    """The rows of an encoder: smaller sizes, the whole alone, and with the IDF cosine added to its cosine.

    The score of a text is that of its best window.
    """
    whole, owners = embed_windows(in_role(encoder, "document"), test.texts)
    # the squared length of the mean of unit vectors is the mean cosine of any two
    if (cosine := float(np.square(whole.mean(axis=0, dtype=np.float64)).sum())) > _COLLAPSED and len(test.texts) > 1:
        get_logger().warning(
            "%s: its embeddings are nearly equal (mean cosine %.4f), so its order of texts is chance",
            encoder.name,
            cosine,
        )
    queries = in_role(encoder, "query").encode(test.queries)
    starts = np.flatnonzero(np.diff(owners, prepend=-1))  # windows of a text are neighbours

    def scores(part: slice, size: int | None = None, weight: float = 0.0) -> F32:
        texts = unit_rows(whole[:, :size]) if size else whole
        values = np.maximum.reduceat(unit_rows(queries[part, :size]) @ texts.T, starts, axis=1)
        return values + np.float32(weight) * lexicon.idf_cosine(test.queries[part]) if weight else values

    name = encoder.name
    of_sizes = [_by_chunks(f"{name} [{size}]", test, partial(scores, size=size)) for size in sizes]
    hybrid = [_by_chunks(f"{name} + {IDF}", test, partial(scores, weight=weight)) for weight in weights]
    return [*of_sizes, _by_chunks(name, test, scores), *hybrid]


def _by_chunks(name: str, test: RetrievalTest, scores: Callable[[slice], F32]) -> RetrievalScores:
    """A row of the table, with the scores of a few queries in memory at a time."""
    parts = [slice(start, start + _CHUNK_QUERIES) for start in range(0, len(test.queries), _CHUNK_QUERIES)]
    values = [measures(scores(part), test.relevant[part]) for part in parts]
    return RetrievalScores(name, np.concatenate(values), test.answers)


def differences(first: RetrievalScores, second: RetrievalScores) -> dict[str, Comparison]:
    """The second row minus the first, by measure, by a paired bootstrap over answers."""
    return {
        name: compare(grouped(before, first.answers), grouped(after, first.answers), SEED, share)
        for name, before, after in zip(MEASURES, first.values.T, second.values.T, strict=True)
    }


def write_comparison(
    test: RetrievalTest, scored: Sequence[RetrievalScores], encoders: Sequence[str], folder: Path
) -> str:
    """Write `pairs.json` and `pairs.md`, each encoder compared with the first of `encoders`; return the table."""
    rows = {row.name: row for row in scored}
    comparisons = {name: differences(rows[encoders[0]], rows[name]) for name in encoders[1:]}
    facts = {name: row.facts() for name, row in rows.items()}
    text = "\n".join(_table(test, facts, encoders, comparisons))
    differ = {
        name: {
            measure: {"value": by.difference, "interval": by.interval, "measurable": by.measurable}
            for measure, by in by_measure.items()
        }
        for name, by_measure in comparisons.items()
    }
    counts = {"queries": len(test.queries), "answers": test.num_answers, "texts": len(test.texts)}
    write_json(folder / "pairs.json", counts | {"scores": facts, "differences": differ})
    write_text(folder / "pairs.md", text + "\n")
    return text


def _table(
    test: RetrievalTest,
    facts: Mapping[str, Mapping[str, Any]],
    encoders: Sequence[str],
    comparisons: dict[str, dict[str, Comparison]],
) -> Iterator[str]:
    counts = f"{len(test.queries):,} queries with {test.num_answers:,} different answers, {len(test.texts):,} texts"
    yield f"{counts}; percent with 95% intervals over answers\n"
    if test.num_answers < MIN_ROWS:
        yield f"fewer than {MIN_ROWS} different answers: no intervals\n"
    yield f"| | {' | '.join(MEASURES)} |"
    yield f"| --- |{' ---: |' * len(MEASURES)}"
    for name, scores in facts.items():
        cells = []
        for fact in scores.values():
            interval = fact["interval"] and f" [{100 * fact['interval'][0]:.1f}, {100 * fact['interval'][1]:.1f}]"
            cells.append(f"{100 * fact['value']:.1f}{interval or ''}")
        yield f"| {name} | {' | '.join(cells)} |"
    for name, by_measure in comparisons.items():
        yield f"\n{name} compared with {encoders[0]}:"
        for measure, comparison in by_measure.items():
            yield f"- {measure}: {comparison.sentence('answers')}"


def stsb_values(encoder: SentenceEncoder, folder: Path) -> F64:
    """`(N, 2)` cosine and judgement of each pair of STS-B's test set."""
    judgements, first, second = zip(*read_pairs(folder, STSB_TEST), strict=True)
    rows, other_rows = (encoder.encode(texts).astype(np.float64) for texts in (first, second))
    return judged_cosines(rows, other_rows, judgements)


def general_sentences() -> list[str]:
    """Sixty sentences, two on each subject."""
    return files(__package__).joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()
