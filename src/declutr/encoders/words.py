"""Baselines without a network: the mean of a text's word vectors, read from a file or derived from a hash.

e(x) = 1/n sum_i v(w_i) over the n words of x that have a vector; 0 for a text without any.
"""

import gzip
import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.errors import EncoderError
from declutr.common.storage import hash_file, hash_json
from declutr.encoders.protocol import texts_of

SUFFIXES = (".vec", ".txt", ".vec.gz", ".txt.gz")
_WORD = re.compile(r"\w+|[^\w\s]")
_CHUNK_TEXTS = 1024
_WORDS_PER_FILE_CHUNK = 1 << 16


def words_of(text: str) -> list[str]:
    """Split into runs of letters and digits, and every other character except spaces; case is kept."""
    return _WORD.findall(text)


def _hashed(text: str) -> list[str]:
    from declutr.common.words import has_other_words, lexical_words  # 30 ms, which no other encoder needs

    return lexical_words(text) if has_other_words(text) else words_of(text.lower())


class HashedWords:
    """Encoder that gives every word a random vector of signs, drawn from the seed and a hash of the word.

    v(w) = s / sqrt(size), s in {-1, 1}^size, of the word in lower case. Embeddings are the same on every machine. Texts
    in scripts without spaces, or with vowel signs, have the words of lexical search (`lexical_words`).
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self.name = f"hashed-words{f'@{seed}' if seed else ''}:{size}"
        self.fingerprint = hash_json({"kind": "hashed-words", "version": 2, "size": size, "seed": seed})

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)`."""
        texts = texts_of(texts)
        embeddings = np.zeros((len(texts), self.size), np.float32)
        for start in range(0, len(texts), _CHUNK_TEXTS):
            numbers: dict[str, int] = {}
            rows = [
                [numbers.setdefault(word, len(numbers)) for word in _hashed(text)]
                for text in texts[start : start + _CHUNK_TEXTS]
            ]
            signs = self._signs(list(numbers))
            for place, row in enumerate(rows, start):
                if row:
                    total = signs[row].sum(axis=0, dtype=np.int64)  # exact, in any order
                    embeddings[place] = total / (len(row) * np.sqrt(self.size))
        return embeddings

    def _signs(self, words: list[str]) -> NDArray[np.int8]:
        """Signs -1 and 1, `(len(words), size)`."""
        digests = [hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest() for word in words]
        keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
        drawn = seeding.words(self.seed, "hashed-words", keys, np.zeros_like(keys), -(-self.size // 32))
        # Little-endian on every machine.
        raw = np.ascontiguousarray(drawn.astype("<u4")).view(np.uint8)
        bits = np.unpackbits(raw.reshape(len(words), 4 * drawn.shape[1]), axis=1, bitorder="little")
        return (bits[:, : self.size].astype(np.int8) << 1) - 1


class WordVectors:
    """Mean of the vectors of a text's words, in the text format of fastText and GloVe.

    In plain texts, `words_of` finds the words. A word missing in the file is looked up in lower case, and skipped if
    that is missing too; the first of a word's lines counts. Tokenized texts are handled like `examples/bow.py` of
    SentEval: split at white space, each word looked up as written, in the last of its lines.

    The file has one word per line, followed by its numbers, separated by spaces or tabs. A first line with the numbers
    of words and dimensions is optional, gzip compression too. Only the words of the vocabulary are held in memory, as
    written and in lower case; None: every word of the file.

    Raises:
        EncoderError: the file is missing, a line has another length, or the file has no word of the vocabulary.
    """

    def __init__(self, path: Path, vocabulary: Collection[str] | None = None, tokenized: bool = False) -> None:
        self.name = str(path)
        self._tokenized = tokenized
        forms = None if vocabulary is None else {form for word in vocabulary for form in (word, word.lower())}
        self._places: dict[str, int] = {}
        chunks, number = [], 0
        try:
            for words, vectors in _read(path, forms):
                chunks.append(vectors)
                new_places = {word: place for place, word in enumerate(words, number)}
                self._places = self._places | new_places if tokenized else new_places | self._places
                number += len(words)
        except (OSError, EOFError) as error:
            raise EncoderError(f"{path}: cannot be read as word vectors: {error}") from error
        if not chunks:
            raise EncoderError(f"{path}: holds no word vector{'' if forms is None else ' of the requested words'}")
        self._vectors = np.concatenate(chunks)
        self.size = self._vectors.shape[1]
        made_of = {"kind": "word-vectors", "version": 1, "file": hash_file(path)}
        self.fingerprint = hash_json(made_of | ({"words": "white space"} if tokenized else {}))

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Embeddings `(len(texts), size)`."""
        texts = texts_of(texts)
        embeddings = np.zeros((len(texts), self.size), np.float32)
        for place, text in enumerate(texts):
            rows = self._rows(text)
            if rows:
                embeddings[place] = self._vectors[rows].mean(axis=0, dtype=np.float64)
        return embeddings

    def _rows(self, text: str) -> list[int]:
        if self._tokenized:
            rows = [self._places.get(word, -1) for word in text.split()]
        else:
            rows = [self._places.get(word, self._places.get(word.lower(), -1)) for word in words_of(text)]
        return [row for row in rows if row >= 0]


def _read(path: Path, forms: set[str] | None) -> Iterator[tuple[list[str], NDArray[np.float32]]]:
    """Words with their vectors `(words, size)`, in file order, in bounded chunks."""
    words: list[str] = []
    rows: list[list[bytes]] = []
    size, separator = 0, b""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if number == 1 and len(head := line.split()) == 2 and head[0].isdigit() and head[1].isdigit():
                size = int(head[1])
                if not size:
                    raise EncoderError(f"{path}, line 1: word vectors of 0 numbers")
                continue
            separator = separator or (b"\t" if b"\t" in line else b" ")
            first, _, rest = line.rstrip().partition(separator)
            if not size:
                size = len(rest.split())
            if not size:
                raise EncoderError(f"{path}, line {number}: no numbers after a word and a space or tab")
            word = first.decode("utf-8", "replace")
            if forms is not None and word not in forms:
                continue
            values = rest.split()
            if len(values) > size:  # some files have words that contain spaces; no text is split into such words
                continue
            if len(values) < size:
                raise EncoderError(
                    f"{path}, line {number}: {len(values)} numbers, expected {size}; is the file cut off?"
                )
            words.append(word)
            rows.append(values)
            if len(rows) == _WORDS_PER_FILE_CHUNK:
                yield words, _numbers(path, rows)
                words, rows = [], []
    if rows:
        yield words, _numbers(path, rows)


def _numbers(path: Path, rows: list[list[bytes]]) -> NDArray[np.float32]:
    try:
        return np.array(rows).astype(np.float32)
    except ValueError as error:
        raise EncoderError(f"{path}: is not a file of word vectors: {error}") from error
