"""What people type, taken from documents: a question or the first sentence of a paragraph that searches its answer.

Legend: n documents, S pairs of a query and its answer.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from declutr.adaptation.config import LENGTHS
from declutr.common.bootstrap import MIN_ROWS
from declutr.common.words import num_words
from declutr.trainer.objectives.scores import ahead

_BLANK_LINES = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])")
_QUERY_WORDS = range(4, 41)
_ANSWER_WORDS = 20  # at least
_PER_DOCUMENT = 4
T = TypeVar("T")
Pair = tuple[str, str]  # A query and its answer


@dataclass(frozen=True)
class Paragraphs:
    """Queries of the documents of a split, and the texts that they search."""

    queries: list[str]  # `S` questions, or first sentences of paragraphs; all different
    answers: list[str]  # `S` texts behind them, all different before they are cut to the length of a passage
    owners: NDArray[np.int64]  # `(S,)` number of the document of each pair, ascending
    num_documents: int  # n

    def recall(self, scores: NDArray[np.float32]) -> NDArray[np.float64]:
        """`(n, 2)` queries of each document that find their answer first among all answers, and queries of it.

        The scores are `(S, S)`, query by answer; a tie is not the first.
        """
        counts = np.zeros((self.num_documents, 2))
        if self.queries:
            np.add.at(counts[:, 0], self.owners, ahead(scores, scores.diagonal().copy(), tie=1.0) == 1)
            np.add.at(counts[:, 1], self.owners, 1)
        return counts


NO_PARAGRAPHS = Paragraphs([], [], np.empty(0, np.int64), 0)


def uncut_engine(tokenizer: Any) -> Tokenizer:
    """The engine of a tokenizer of transformers, without its cuts: a copy, as the encoder's own stays as it is."""
    engine = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    engine.no_truncation()
    engine.no_padding()
    return engine


def paragraph_pairs(
    splits: Mapping[T, Sequence[str]],
    tokenizer: Any,
    passage_tokens: int = LENGTHS.passage,
    own: Mapping[str, Sequence[str]] | None = None,
) -> dict[T, Paragraphs]:
    """Of each split at most four pairs of a document, spread over it, whose answers are cut to a passage's length.

    They are questions if 100 documents of each split have some, else first sentences. Passages of one's own, by the
    text of their document, take the place of paragraphs.
    """
    engine = uncut_engine(tokenizer)

    def cut(answer: str) -> str:
        ends = [end for _, end in engine.encode(answer, add_special_tokens=False).offsets]
        return answer if len(ends) <= passage_tokens else answer[: ends[passage_tokens - 1]]

    def spread(documents: Sequence[list[Pair]]) -> Paragraphs:
        rows: list[tuple[str, str, int]] = []
        for number, pairs in enumerate(documents):
            places = np.unique(np.linspace(0, len(pairs) - 1, min(_PER_DOCUMENT, len(pairs))).round().astype(int))
            rows += [(*pairs[place], number) for place in places.tolist()]
        owners = np.array([owner for *_, owner in rows], np.int64)
        return Paragraphs([row[0] for row in rows], [cut(row[1]) for row in rows], owners, len(documents))

    taken = {
        split: [_pairs(_BLANK_LINES.split(text) if own is None else own[text]) for text in documents]
        for split, documents in splits.items()
    }
    kinds = [{split: _own([pairs[kind] for pairs in rows]) for split, rows in taken.items()} for kind in range(2)]
    asked = min(sum(map(bool, documents)) for documents in kinds[0].values()) >= MIN_ROWS
    return {split: spread(documents) for split, documents in kinds[0 if asked else 1].items()}


def _own(documents: Sequence[list[Pair]]) -> list[list[Pair]]:
    """The pairs of each document without what several share, such as a licence: it has more than one right answer."""
    queries = Counter(query.lower() for pairs in documents for query, _ in pairs)
    answers = Counter(answer for pairs in documents for _, answer in pairs)
    return [[pair for pair in pairs if queries[pair[0].lower()] == answers[pair[1]] == 1] for pairs in documents]


def _pairs(paragraphs: Sequence[str]) -> tuple[list[Pair], list[Pair]]:
    """Questions with what follows them, and first sentences of paragraphs with the rest, of a document."""
    blocks = [" ".join(block.split()) for block in paragraphs]
    questions, firsts = [], []
    for block, following in zip(blocks, [*blocks[1:], ""], strict=True):
        first, *others = _SENTENCE_END.split(block.lstrip("# "))
        rest = " ".join(others)
        if first.endswith("?"):  # those within a paragraph are mostly rhetorical
            questions.append((first, rest or following))  # a heading has no rest
        elif block[:1].isalnum() and not block[:1].islower():  # no heading, list, table, or end of a sentence
            firsts.append((first, rest))
    return [pair for pair in questions if _fit(*pair)], [pair for pair in firsts if _fit(*pair)]


def _fit(query: str, answer: str) -> bool:
    return num_words(query) in _QUERY_WORDS and num_words(answer) >= _ANSWER_WORDS
