"""`declutr embed MODEL INPUT --output OUT`: a file of texts to a file of embeddings, whole or not at all."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from common.storage import write_aside
from evaluation.encoder import load_encoder

_CHUNK_TEXTS = 4096


class EmbedError(ValueError):
    """Texts that cannot be read or an output that cannot be written."""


def embed_file(model: str, source: Path, output: Path, text_field: str = "text") -> int:
    """Embeds every text of `source` into `output`; returns their number.

    Args:
        model: exported folder, or any name `load_encoder` takes.
        source: .jsonl or .parquet with a column `text_field`; any other file: one text a line, empty lines included.
        output: .npy (float32, `(texts, size)`) or .parquet (columns row, embedding), in the order of the texts.
        text_field: column of the text.

    Raises:
        EmbedError: no such file, no such column, a line that is no JSON or no UTF-8, an unknown ending.
        EncoderError: the model cannot be loaded.
    """
    writers = {".npy": _write_npy, ".parquet": _write_parquet}
    if output.suffix not in writers:
        raise EmbedError(f"--output {output}: must end in {' or '.join(writers)}")
    if not source.is_file():
        raise EmbedError(f"{source}: no such file")
    num_texts = sum(1 for _ in _texts(source, text_field))  # also finds what cannot be read, before the model is loaded
    encoder = load_encoder(model)

    def chunks() -> Iterator[NDArray[np.float32]]:
        texts = _texts(source, text_field)
        with tqdm(total=num_texts, unit="text", desc="embed", file=sys.stderr, dynamic_ncols=True) as bar:
            while chunk := list(itertools.islice(texts, _CHUNK_TEXTS)):
                yield encoder.encode(chunk)
                bar.update(len(chunk))

    with write_aside(output) as aside:
        writers[output.suffix](aside, chunks, (num_texts, encoder.size))
    return num_texts


Chunks = Callable[[], Iterator[NDArray[np.float32]]]


def _write_npy(path: Path, chunks: Chunks, shape: tuple[int, int]) -> None:
    with path.open("wb") as stream:
        np.lib.format.write_array_header_1_0(
            stream,
            {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)), "fortran_order": False, "shape": shape},
        )
        for chunk in chunks():
            stream.write(chunk.tobytes())


def _write_parquet(path: Path, chunks: Chunks, shape: tuple[int, int]) -> None:
    schema = pa.schema([("row", pa.int64()), ("embedding", pa.list_(pa.float32(), shape[1]))])
    done = 0
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chunks():
            rows = pa.array(np.arange(done, done + len(chunk)))
            values = pa.FixedSizeListArray.from_arrays(pa.array(chunk.reshape(-1)), shape[1])
            writer.write_table(pa.Table.from_arrays([rows, values], schema=schema))
            done += len(chunk)


def _texts(source: Path, text_field: str) -> Iterator[str]:
    if source.suffix == ".parquet":
        yield from _parquet_texts(source, text_field)
        return
    with source.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
                yield line if source.suffix != ".jsonl" else _json_text(line, text_field)
            except ValueError as error:  # of the decoding or of the JSON
                raise EmbedError(f"{source}, line {number}: {error}") from error


def _json_text(line: str, text_field: str) -> str:
    row = json.loads(line)
    text = row.get(text_field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return text
    raise ValueError(f"is no object with a text in {text_field!r}; name the field with --text-field")


def _parquet_texts(source: Path, text_field: str) -> Iterator[str]:
    try:
        file = pq.ParquetFile(source)
    except pa.ArrowInvalid as error:
        raise EmbedError(f"{source}: {error}") from error
    if text_field not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise EmbedError(f"{source} has no column {text_field!r}, only {names}; name it with --text-field")
    for batch in file.iter_batches(columns=[text_field]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise EmbedError(f"{source}: column {text_field!r} holds {text!r}, which is no text")
            yield text
