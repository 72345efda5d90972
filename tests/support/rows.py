"""Rows of texts, images and sounds, as the shards hold them."""

import io

import numpy as np
import pyarrow as pa
from PIL import Image
from tiny import VOCAB_SIZE

MELS = 6


def text_rows(rows: list[list[tuple[int, int]]], seed: int = 0) -> pa.Table:
    """Rows of random texts; each text is given by its number of tokens and its label."""
    columns = {"id": [], "tokens": [], "starts": [], "labels": [], "num_tokens": []}
    for number, texts in enumerate(rows):
        rng = np.random.default_rng([seed, number])
        sizes = [size for size, _ in texts]
        columns["id"].append(rng.bytes(16))
        columns["tokens"].append(rng.integers(4, VOCAB_SIZE - 1, sum(sizes)))
        columns["starts"].append(np.cumsum([0, *sizes[:-1]]))
        columns["labels"].append([label for _, label in texts])
        columns["num_tokens"].append(sum(sizes))
    types = {"tokens": pa.list_(pa.uint16()), "starts": pa.list_(pa.int32()), "labels": pa.list_(pa.int8())}
    return _table(columns, types | {"num_tokens": pa.int64()})


def sentences(lengths: list[int], seed: int = 0) -> pa.Table:
    """Rows of one sentence each."""
    return text_rows([[(length, -1)] for length in lengths], seed)


def image_rows(sizes: list[tuple[int, int]], labels: str = "abab", seed: int = 0) -> pa.Table:
    """Rows of random images of these widths and heights."""
    columns = {"id": [], "image": [], "width": [], "height": [], "label": []}
    for number, (width, height) in enumerate(sizes):
        rng = np.random.default_rng([seed, number])
        stored = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(stored, "PNG")
        columns["id"].append(rng.bytes(16))
        columns["image"].append(stored.getvalue())
        columns["width"].append(width)
        columns["height"].append(height)
        columns["label"].append(labels[number % len(labels)])
    return _table(columns, {"image": pa.binary(), "width": pa.int32(), "height": pa.int32()})


def clip_rows(lengths: list[int], labels: str = "xyx", seed: int = 0, mels: int = MELS) -> pa.Table:
    """Rows of random spectrograms with these numbers of frames."""
    columns = {"id": [], "frames": [], "num_frames": [], "label": []}
    for number, length in enumerate(lengths):
        rng = np.random.default_rng([seed, number])
        columns["id"].append(rng.bytes(16))
        columns["frames"].append(rng.normal(size=length * mels).astype(np.float32))
        columns["num_frames"].append(length)
        columns["label"].append(labels[number % len(labels)])
    return _table(columns, {"frames": pa.list_(pa.float32()), "num_frames": pa.int32()})


def _table(columns: dict[str, list], types: dict[str, pa.DataType]) -> pa.Table:
    types = {"id": pa.binary(16), "label": pa.string(), **types}
    return pa.table({name: pa.array(values, types[name]) for name, values in columns.items()})


class Rows:
    """Rows in memory with the interface of a set of shards."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.num_documents = len(table)

    def take(self, documents: np.ndarray) -> pa.Table:
        missing = [pa.nulls(len(documents))] * 2
        taken = self.table.take(pa.array(documents)).combine_chunks()
        return taken.append_column("source", missing[0]).append_column("offset", missing[1])
