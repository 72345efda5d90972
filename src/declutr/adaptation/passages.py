"""Documents that are not trained on, their passages and headings, and the measures on these.

Held-out documents are divided into those that choose (development) and those that report (test). Every measure has a
value for each row (a document or a query), so that two encoders are compared on the same rows.
Legend: n documents, P passages of all of them, Q queries.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from declutr.adaptation.config import APART, LENGTHS, Lengths
from declutr.adaptation.paragraphs import uncut_engine
from declutr.common import seeding
from declutr.common.console.logs import get_logger
from declutr.common.words import num_words
from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.job.units import Corpus, UnitReader, plan_units
from declutr.pipeline.readers.corpus import Document, Rejected, document_id
from declutr.pipeline.shards.shards import ShardSet, document_keys
from declutr.trainer.model.language_model import prompt_ids
from declutr.trainer.objectives.scores import ahead

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]
Split = Literal["development", "test"]
MOST_DOCUMENTS = 500
"""Documents of a split that are scored: long ones by key, then others; more would hardly narrow the intervals."""
_MOST_OF_FEW = 5 * MOST_DOCUMENTS  # each fold searches among as many as a split
"""The same for a corpus that is scored in five folds."""


def held_out_documents(corpus: Corpus, data: Path, seed: int, lengths: Lengths = LENGTHS) -> dict[Split, list[str]]:
    """Texts of the documents of each split, by their keys, with their line breaks; reads the corpus again for them.

    Which document belongs to which split is a function of the seed and the document. `data` is the prepared corpus.
    """
    ids, keys, tokens = _rows(data, "held-out")
    drawn = seeding.unit(seeding.words(seed, "adaptation split", keys, np.zeros_like(keys), 1))[:, 0]
    splits: dict[Split, NDArray[np.int64]] = {
        "development": np.flatnonzero(drawn < 0.5),
        "test": np.flatnonzero(drawn >= 0.5),
    }
    chosen = {
        split: [ids[place] for place in rows[_select(keys[rows], tokens[rows] >= lengths.long, MOST_DOCUMENTS)]]
        for split, rows in splits.items()
    }
    texts = _read(corpus, {identity for part in chosen.values() for identity in part})
    return {split: [texts[identity] for identity in part if identity in texts] for split, part in chosen.items()}


def all_documents(corpus: Corpus, data: Path, lengths: Lengths = LENGTHS) -> list[str]:
    """Texts of a corpus with few long documents, by their keys; of more than 2,500 the long ones and some others."""
    ids, keys, tokens = _rows(data, "train", "held-out")
    chosen = dict.fromkeys(ids[place] for place in _select(keys, tokens >= lengths.long, _MOST_OF_FEW))
    texts = _read(corpus, {*chosen})
    return [texts[identity] for identity in chosen if identity in texts]


def _select(keys: NDArray[np.uint64], long: NDArray[np.bool_], max_documents: int) -> NDArray[np.int64]:
    """Places of at most `max_documents` documents in the order of their keys; long ones have precedence."""
    first = np.lexsort((keys, ~long))[:max_documents]  # lexsort's last key leads
    return first[np.argsort(keys[first])]


def _rows(data: Path, *splits: str) -> tuple[list[bytes], NDArray[np.uint64], NDArray[np.int64]]:
    """Ids, keys and numbers of tokens of all documents of some parts of the shards."""
    ids, keys, tokens = list[bytes](), [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for shards in (ShardSet(data, split) for split in splits):
        if shards.num_documents:
            rows = shards.take(np.arange(shards.num_documents))
            ids += rows.column("id").to_pylist()
            keys.append(document_keys(rows))
            tokens.append(rows.column("num_tokens").to_numpy())
    return ids, np.concatenate(keys), np.concatenate(tokens)


def _read(corpus: Corpus, ids: set[bytes]) -> dict[bytes, str]:
    """The texts of the documents with these ids."""
    texts: dict[bytes, str] = {}
    units, _ = plan_units(corpus, None)
    for record in (record for unit in units for record in UnitReader(unit, corpus)):
        if len(texts) == len(ids):
            break
        if isinstance(record, Document) and not isinstance(record, Rejected):  # a rejected one is a Document too
            identity = document_id(normalise(record.text).encode())  # as `prepare` names it
            if identity in ids:
                texts.setdefault(identity, record.text)
    return texts


_PASSAGES = 8  # so many that 100 documents give a useful interval (docs/decisions/0036-adaptation.md)
_HEADING = re.compile(r"#{1,6}\s+(.+)")
_MOST_WORDS, _MOST_HEADINGS = 20, 8  # words of a heading; headings of a document that search


@dataclass(frozen=True)
class Passages:
    """Passages of the documents of a split, and the headings that belong to the documents."""

    texts: list[str]  # `P` passages, by document
    ids: list[list[int]]  # `P` lists of token ids, special ones included
    owners: NDArray[np.int64]  # `(P,)` number of the document of each, ascending
    starts: NDArray[np.int64]  # `(P,)` token of its document at which each starts
    ends: NDArray[np.int64]  # `(P,)` token behind the last of each
    queries: list[str]  # Q headings; no passage contains them
    targets: NDArray[np.int64]  # `(Q,)` number of the document of each heading
    num_documents: int  # N

    def apart(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether at least 96 tokens are between two passages of a document; nearer ones share words."""
        gap = np.maximum(self.starts[second] - self.ends[first], self.starts[first] - self.ends[second])
        return gap >= APART

    @cached_property
    def scorable(self) -> NDArray[np.bool_]:
        """`(n,)` true for a document with two passages at least 96 tokens apart, which alone `distant` scores."""
        ends = np.cumsum(np.bincount(self.owners, minlength=self.num_documents))
        firsts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return self.apart(firsts, ends - 1)

    def distant(self, scores: F32) -> F64:
        """`(n,)` recall@1 of passages that search another one of their document, NaN without a distant pair.

        Each passage searches each gallery, which has one passage of every document. Its own document's passage must be
        at least 96 tokens away and must have the highest score of its row of `(P, P)`; a tie is not the highest.
        """
        hits, pairs = np.zeros(self.num_documents), np.zeros(self.num_documents)
        counts = np.bincount(self.owners, minlength=self.num_documents)
        for place in range(_PASSAGES):  # relative to the length of every document
            gallery = np.cumsum(counts) - counts + place * counts // _PASSAGES
            own = gallery[self.owners]
            far = self.apart(np.arange(len(own)), own)
            table = scores[:, gallery]
            best = ahead(table, scores[np.arange(len(own)), own], tie=1.0) == 1  # else one point for all scores 1
            np.add.at(hits, self.owners, best & far)
            np.add.at(pairs, self.owners, far)
        with np.errstate(invalid="ignore"):
            return hits / pairs  # 0 / 0 is NaN, and `compare` leaves such rows out

    def headings(self, scores: F32) -> F64:
        """`(n, 2)` headings of each document that find it first, and headings of it; a tie finds nothing.

        The score of a document is that of its best passage, of `(Q, P)` scores.
        """
        counts = np.zeros((self.num_documents, 2))
        if not self.queries:
            return counts
        starts = np.flatnonzero(np.diff(self.owners, prepend=-1))
        table = np.maximum.reduceat(scores, starts, axis=1)
        own = table[np.arange(len(table)), self.targets]
        np.add.at(counts[:, 0], self.targets, ahead(table, own, tie=1.0) == 1)
        np.add.at(counts[:, 1], self.targets, 1)
        return counts


def make_passages(
    documents: Sequence[str],  # their texts
    tokenizer: Any,  # of transformers
    prompt: str = "",  # text before each passage, whose tokens are further ones
    lengths: Lengths = LENGTHS,  # tokens of passages; those of `own` are cut to this length
    # passages by the text of their document, which keep their headings; None: documents are cut.
    own: Mapping[str, Sequence[str]] | None = None,
) -> Passages:
    """Takes at most 8 passages of each document, spread evenly, after its headings were taken out.

    Documents with fewer than two passages are left out. Headings are lines that begin with #, and a short first line;
    those of several documents, such as "Introduction", and those of one word are left out.
    """
    parts = [_headings(text) if own is None else ([], text) for text in documents]
    # a set: a heading that one document repeats still names it alone
    common = Counter(heading for headings, _ in parts for heading in {line.lower() for line in headings})
    engine = uncut_engine(tokenizer)  # passages are cut here, from the whole document
    example = engine.encode("a", add_special_tokens=True)
    places = [place for place, special in enumerate(example.special_tokens_mask) if not special]
    before, after = example.ids[: places[0]], example.ids[places[-1] + 1 :]
    before += prompt_ids(tokenizer, prompt)
    texts, ids, owners, starts, ends, queries, targets = [], [], [], [], [], [], []
    number = cut = 0
    for headings, body in parts:
        pieces = _cut(engine, body, lengths) if own is None else _own_pieces(engine, own[body])
        if len(pieces) < 2:
            continue
        # unique: of fewer pieces than passages, some would be taken twice
        chosen = np.unique(np.linspace(0, len(pieces) - 1, _PASSAGES).round().astype(np.int64))
        for start, tokens, text in (pieces[place] for place in chosen.tolist()):
            ids.append([*before, *tokens[: lengths.passage], *after])
            cut += len(tokens) > lengths.passage
            texts.append(text)
            owners.append(number)
            starts.append(start)
            ends.append(start + len(tokens))
        naming = [heading for heading in dict.fromkeys(headings) if common[heading.lower()] == 1]  # else two answers
        queries += naming[:_MOST_HEADINGS]
        targets += [number] * len(naming[:_MOST_HEADINGS])
        number += 1
    if cut:
        get_logger().warning(
            "%d of %d passages that are scored have more than %d tokens: their ends are not read",
            cut, len(ids), lengths.passage,
        )  # fmt: skip
    at = np.array(owners, np.int64), np.array(starts, np.int64), np.array(ends, np.int64)
    return Passages(texts, ids, *at, queries, np.array(targets, np.int64), number)


Piece = tuple[int, list[int], str]  # first token in its document, tokens, and text


def _cut(engine: Tokenizer, body: str, lengths: Lengths) -> list[Piece]:
    """The beginnings of a document's windows."""
    encoded = engine.encode(body, add_special_tokens=False)
    ids, offsets = encoded.ids, encoded.offsets  # once: each reading of them copies the whole document
    return [
        (start, ids[start:end], body[offsets[start][0] : offsets[end - 1][1]])
        for start in (lengths.window * number for number in range(len(ids) // lengths.window))
        for end in (start + lengths.passage,)
    ]


def _own_pieces(engine: Tokenizer, passages: Sequence[str]) -> list[Piece]:
    """The user's passages of a document."""
    pieces, start = list[Piece](), 0
    for passage, encoded in zip(passages, engine.encode_batch(list(passages), add_special_tokens=False), strict=True):
        pieces.append((start, encoded.ids, passage))
        start += len(encoded.ids)
    return pieces


def _headings(text: str) -> tuple[list[str], str]:
    """The headings of a document, and its text without their lines."""
    headings, kept = [], []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        match = _HEADING.fullmatch(line)
        # a document of one line would have no text left
        heading = match[1].strip() if match else line if number == 0 and len(lines) > 1 else None
        if heading is None or num_words(heading) > _MOST_WORDS:
            kept.append(line)
        elif num_words(heading) > 1:
            headings.append(heading)
    return headings, "\n".join(kept)
