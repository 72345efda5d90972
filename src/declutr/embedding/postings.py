"""The words of an index, with the texts that have them.

`words.arrow` has the words in the order of their code points, each with its number of texts. `postings.arrow` has for
one word after the other the rows of its texts, ascending, and the word's weights in them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from declutr.common.errors import UsageError
from declutr.common.words import lexical_words
from declutr.evaluation.retrieval.lexicon import LexicalKind, Lexicon, query_weights

WORDS, POSTINGS = "words.arrow", "postings.arrow"
_WORDS = pa.schema([("word", pa.large_string()), ("texts", pa.int64())])
_POSTINGS = pa.schema([("row", pa.int32()), ("weight", pa.float32())])


def write_words(folder: Path, texts: Iterable[str], kind: LexicalKind) -> int:
    """Write the words of texts, read once, to `words.arrow` and `postings.arrow`; return the number of words."""
    lexicon = Lexicon(texts)
    words = sorted(lexicon.words)  # `StoredWords` bisects them
    order = np.array([lexicon.words[word] for word in words], np.int64)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    weights = lexicon.weights(kind)
    # tocsc sorts the rows of each word, as `StoredWords` needs them
    by_word = csr_matrix((weights.data, ranks[weights.indices], weights.indptr), weights.shape).tocsc()
    counts = lexicon.in_texts.astype(np.int64)[order]
    _write(folder / WORDS, _WORDS, [pa.array(words, pa.large_string()), pa.array(counts)])
    rows, values = by_word.indices.astype(np.int32), by_word.data.astype(np.float32)
    _write(folder / POSTINGS, _POSTINGS, [pa.array(rows), pa.array(values)])
    return len(words)


def _write(path: Path, schema: pa.Schema, columns: list[pa.Array]) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


class StoredWords:
    """Words of an index of that many rows."""

    def __init__(self, folder: Path, rows: int, kind: LexicalKind) -> None:
        self._rows, self._kind = rows, kind
        words, postings = _read_batch(folder / WORDS, _WORDS), _read_batch(folder / POSTINGS, _POSTINGS)
        self._words = words.column("word")
        self._counts = words.column("texts").to_numpy()
        self._texts, self._weights = postings.column("row").to_numpy(), postings.column("weight").to_numpy()
        self._ends = np.cumsum(self._counts)
        fits = not len(self._counts) or (self._counts.min() >= 1 and self._counts.max() <= rows)
        # or a word would be scored with the rows of another
        if not fits or int(self._counts.sum()) != len(self._texts):
            raise wrong_file(folder / WORDS, "the numbers of texts do not fit")
        if len(self._texts) and not (self._texts.min() >= 0 and self._texts.max() < rows):
            raise wrong_file(folder / POSTINGS, f"texts beyond the {rows:,} of the index")
        ascending = self._texts[1:] > self._texts[:-1]
        ascending[self._ends[:-1] - 1] = True  # the next word starts
        if not ascending.all() or not np.isfinite(self._weights).all():
            raise wrong_file(folder / POSTINGS, "rows that do not ascend, or weights that are not finite")

    def scores(self, query: str) -> NDArray[np.float32]:
        """`(rows,)` scores between 0 and 1; all 0 if no text has a word of the query."""
        scores = np.zeros(self._rows)  # float64, so that a sum of words is rounded once
        occurring = [(self._place(word), number) for word, number in Counter(lexical_words(query)).items()]
        places = np.array([place for place, _ in occurring if place is not None], np.int64)
        occurrences = np.array([number for place, number in occurring if place is not None], np.float64)
        weights = query_weights(self._kind, occurrences, self._counts[places].astype(np.float64), self._rows)
        for place, weight in zip(places.tolist(), weights.tolist(), strict=True):
            postings = slice(self._ends[place] - self._counts[place], self._ends[place])
            # ascending rows are distinct, so that none is added once for two
            scores[self._texts[postings]] += weight * self._weights[postings]
        return scores.astype(np.float32)

    def _place(self, word: str) -> int | None:
        place = bisect_left(self._words, word, key=lambda scalar: scalar.as_py())
        return place if place < len(self._words) and self._words[place].as_py() == word else None


def _read_batch(path: Path, schema: pa.Schema) -> pa.RecordBatch:
    try:
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        if file.schema != schema or file.num_record_batches != 1:
            raise wrong_file(path, "other columns or parts")
        batch = file.get_batch(0)
        batch.validate(full=True)  # offsets beyond the file would end the process
    except (pa.ArrowException, OSError) as error:
        raise wrong_file(path, str(error)) from error
    if any(column.null_count for column in batch.columns):
        raise wrong_file(path, "values are missing")
    return batch


def wrong_file(path: Path, why: str) -> UsageError:
    """The refusal of a file of an index."""
    return UsageError(f"{path} is cut off, altered, or not of `declutr index` ({why}); build the index again")
