"""Rows of ledgers by the name or place of a document."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from declutr.pipeline.shards.ledger import LEDGERS, Entry, ledger_batches

_SHORTEST_PREFIX = 8
_OFFSET_DIGITS = 18  # of an int64


def find_entries(
    folder: Path,  # output folder of `prepare`
    # a document id in hexadecimal (or its first digits, an even number of at least 8), a source, or `SOURCE:OFFSET`.
    document: str,
) -> Iterator[tuple[str, int, Entry]]:
    """Every row of an output folder that matches a name, with its unit and its ordinal."""
    source, _, offset = document.rpartition(":")
    prefix = _hex_prefix(document)
    for path in sorted((folder / LEDGERS).glob("*.arrow")):
        for start, batch in _batches(path):
            mask = pc.equal(batch.column("source"), document)
            # `isdigit` takes superscripts, which `int` refuses.
            if source and offset.isdecimal() and len(offset) <= _OFFSET_DIGITS:
                here = pc.and_(pc.equal(batch.column("source"), source), pc.equal(batch.column("offset"), int(offset)))
                mask = pc.or_(mask, here)
            if prefix is not None:
                # `starts_with` takes no fixed_size_binary.
                by_id = pc.starts_with(batch.column("id").cast(pa.binary()), pattern=prefix)
                mask = pc.or_(mask, pc.fill_null(by_id, fill_value=False))  # no id where nothing could be read
            for index in np.flatnonzero(mask.to_numpy(zero_copy_only=False)).tolist():
                yield path.stem, start + index, _entry(batch, index)


def entries_at(folder: Path, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Entry]:
    """Rows of ledgers by unit number and ordinal. An ordinal beyond the end of its unit is absent."""
    entries: dict[tuple[int, int], Entry] = {}
    for unit, group in groupby(sorted(set(places)), key=itemgetter(0)):  # groupby joins neighbours only
        ordinals, path = [ordinal for _, ordinal in group], folder / LEDGERS / f"{unit:05d}.arrow"
        for start, batch in _batches(path) if path.exists() else ():
            inside = (ordinal for ordinal in ordinals if start <= ordinal < start + batch.num_rows)
            entries |= {(unit, ordinal): _entry(batch, ordinal - start) for ordinal in inside}
    return entries


def _batches(path: Path) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of a ledger with the ordinal of their first row."""
    start = 0
    for batch in ledger_batches(path):
        yield start, batch
        start += batch.num_rows


def _entry(batch: pa.RecordBatch, index: int) -> Entry:
    return Entry(**batch.slice(index, 1).to_pylist()[0])


def _hex_prefix(document: str) -> bytes | None:
    """The first bytes of a document id from its hexadecimal digits; None if too short or not hexadecimal."""
    if len(document) < _SHORTEST_PREFIX or len(document) % 2:
        return None
    try:
        return bytes.fromhex(document)
    except ValueError:
        return None
