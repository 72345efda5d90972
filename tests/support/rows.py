"""Rows of texts, images and sounds, as the shards hold them."""

import io

import numpy as np
import pyarrow as pa
from PIL import Image
from tiny import ID, NUM_TOKENS, TOKENS, VOCAB_SIZE, table_of

MELS, LABEL = 6, ("label", pa.string())


def text_rows(rows, seed=0):
    """Rows of random texts; each text is given by its number of tokens and its label."""
    table = []
    for number, texts in enumerate(rows):
        rng = np.random.default_rng([seed, number])
        sizes, labels = zip(*texts, strict=True)
        identity, tokens = rng.bytes(16), rng.integers(4, VOCAB_SIZE - 1, sum(sizes))
        table.append((identity, tokens, np.cumsum([0, *sizes[:-1]]), labels, sum(sizes)))
    starts, labels = ("starts", pa.list_(pa.int32())), ("labels", pa.list_(pa.int8()))
    return table_of(table, ID, TOKENS, starts, labels, NUM_TOKENS)


def sentences(lengths, seed=0):
    return text_rows([[(length, -1)] for length in lengths], seed)


def image_rows(sizes, labels="abab", seed=0):
    rows = []
    for number, (width, height) in enumerate(sizes):
        rng, stored = np.random.default_rng([seed, number]), io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stored, "PNG")
        rows.append((rng.bytes(16), stored.getvalue(), width, height, labels[number % len(labels)]))
    return table_of(rows, ID, ("image", pa.binary()), ("width", pa.int32()), ("height", pa.int32()), LABEL)


def clip_rows(lengths, labels="xyx", seed=0, mels=MELS):
    rows = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng([seed, number])
        identity, frames = rng.bytes(16), rng.normal(size=length * mels).astype(np.float32)
        rows.append((identity, frames, length, labels[number % len(labels)]))
    return table_of(rows, ID, ("frames", pa.list_(pa.float32())), ("num_frames", pa.int32()), LABEL)


class Rows:
    """Rows in memory with the interface of a set of shards."""

    def __init__(self, table):
        self.table, self.num_documents = table, len(table)

    def take(self, documents):
        rows, missing = self.table.take(pa.array(documents)).combine_chunks(), pa.nulls(len(documents))
        return rows.append_column("source", missing).append_column("offset", missing)
