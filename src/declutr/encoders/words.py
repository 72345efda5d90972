"""A baseline without a network: the mean of a text's word vectors, which are derived from a hash.

e(x) = 1/n sum_i v(w_i) over the n words of x; 0 for a text without any.
"""

import hashlib
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from declutr.common import seeding
from declutr.common.storage import hash_json
from declutr.encoders.protocol import texts_of

_WORD = re.compile(r"\w+|[^\w\s]")
_CHUNK_TEXTS = 1024


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
        # "replace", because a text may hold half of a character
        digests = [hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest() for word in words]
        keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
        # a word of the stream has 32 bits
        drawn = seeding.words(self.seed, "hashed-words", keys, np.zeros_like(keys), -(-self.size // 32))
        # Little-endian on every machine.
        raw = np.ascontiguousarray(drawn.astype("<u4")).view(np.uint8)
        bits = np.unpackbits(raw.reshape(len(words), 4 * drawn.shape[1]), axis=1, bitorder="little")
        return (bits[:, : self.size].astype(np.int8) << 1) - 1
