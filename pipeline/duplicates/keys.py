"""A unit's file of keys for the search, written while the unit is prepared, and the documents of all these files.

`keys/NNNNN.arrow` is an Arrow IPC file of one row whose columns are lists, so that all can be mapped into memory:

| column     | list of               | meaning                                                               |
|------------|-----------------------|-----------------------------------------------------------------------|
| ordinals   | int32                 | number of each document among the unit's records; ascending           |
| ids        | fixed_size_binary(16) | its id                                                                |
| signatures | uint16                | `num_slots` a document, low halves of the slots; empty if not used    |
| keys       | uint64                | ascending; the lowest bit is 0 for an exact key, 1 for a band's       |
| rows       | int32                 | place in `ordinals` of the document that has the key                  |
| labels     | string                | the label of each image or clip; no column without labels             |

Keys are hashes, so a bucket is a range of keys: one slice of every unit's file, for any number of buckets.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from declutr.common.errors import ShardError
from declutr.common.storage import atomic_file
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.shingles import band_keys
from declutr.pipeline.readers.corpus import ID_BYTES

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_SCHEMA = pa.schema(
    [
        pa.field("ordinals", pa.large_list(pa.int32())),
        pa.field("ids", pa.large_list(pa.binary(ID_BYTES))),
        pa.field("signatures", pa.large_list(pa.uint16())),
        pa.field("keys", pa.large_list(pa.uint64())),
        pa.field("rows", pa.large_list(pa.int32())),
    ]
)
_LABELS = pa.field("labels", pa.large_list(pa.string()))
_LOWEST = np.uint64(1)  # set in keys of bands, clear in those of texts
_OPEN_UNITS = 1024  # files mapped at a time: systems allow about 65,000 maps a process


@dataclass(frozen=True)
class UnitKeys:
    """A unit's file of keys, mapped into memory."""

    digest: str  # hash of the contents and of the settings on which they depend
    ordinals: NDArray[np.int32]  # `(num_documents,)`
    ids: U64  # `(num_documents, 2)`: the two halves of each id
    signatures: NDArray[np.uint16]  # `(num_documents, num_slots)`; no columns if near-duplicates are not searched for
    keys: U64
    rows: NDArray[np.int32]
    labels: NDArray[np.object_]  # `(num_documents,)` texts; None without labels


def keys_path(folder: Path, unit: str) -> Path:
    """Path of a unit's keys in the output folder."""
    return folder / "keys" / f"{unit}.arrow"


def write_keys(
    folder: Path,  # the output folder
    unit: str,  # the unit's name
    config: DuplicatesConfig,  # settings; at least one kind of duplicate is on
    ids: Sequence[bytes],  # 16 bytes a document
    ordinals: Sequence[int],  # the number of each document among all records of the unit, strictly ascending
    # `(num_slots,)` a document, from a `Signer` of `config.near`; none without `config.near`.
    signatures: Sequence[NDArray[np.uint32]] = (),
    labels: Sequence[str] = (),  # the label of each image or clip; none for texts, and without labels
) -> None:
    """Writes the keys of a unit's kept documents, whole or not at all. Equal arguments give equal bytes."""
    count = len(ids)
    order = np.asarray(ordinals, np.int32)
    # Little-endian on any host, as the digest is of bytes.
    halves = np.frombuffer(b"".join(ids), "<u8").reshape(count, 2)
    if len(labels) not in (0, count):
        raise ValueError(f"unit {unit}: {len(labels)} labels for {count} documents")
    key_columns = [halves[:, :1] & ~_LOWEST] if config.exact else []
    signed, near_words = np.zeros((count, 0), np.uint32), "near: no"
    if near := config.near:
        signed = np.stack(signatures) if count else np.zeros((0, near.num_slots), np.uint32)
        key_columns.append(band_keys(signed, near) | _LOWEST)
        near_words = f"near: {near.ngram_words} words, {near.bands} bands of {near.rows}"
    keys = np.concatenate(key_columns, axis=1)
    rows = np.repeat(np.arange(count, dtype=np.int32), keys.shape[1])
    flat = keys.reshape(-1)
    sorting = np.argsort(flat, kind="stable")  # stable: equal keys stay in the order of the rows
    arrays: list[NDArray[Any]] = [order, halves, signed.astype(np.uint16), flat[sorting], rows[sorting]]
    # Not the limit of similarity: keys do not depend on it.
    digest = hashlib.blake2b(f"exact: {'yes' if config.exact else 'no'}, {near_words}".encode(), digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)  # hashlib takes no strides
    if labels:
        digest.update(json.dumps(labels).encode())
    schema = (_SCHEMA.append(_LABELS) if labels else _SCHEMA).with_metadata(
        {"digest": digest.hexdigest(), "num_slots": str(signed.shape[1])}
    )
    columns = [_one_row(array, field.type) for array, field in zip(arrays, schema, strict=False)]
    if labels:
        columns.append(pa.array([labels], _LABELS.type))
    with atomic_file(keys_path(folder, unit)) as aside, pa.ipc.new_file(str(aside), schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema=schema))


def _one_row(array: NDArray[Any], list_type: pa.DataType) -> pa.Array:
    """A column of one row that holds all values of an array."""
    values_type = list_type.value_type
    flat = np.ascontiguousarray(array)
    count = flat.nbytes // (values_type.bit_width // 8)
    values = pa.Array.from_buffers(values_type, count, [None, pa.py_buffer(flat)])
    return pa.LargeListArray.from_arrays(pa.array([0, count], pa.int64()), values, type=list_type)


def open_keys(folder: Path, unit: str) -> UnitKeys:
    """Maps a unit's keys into memory."""
    path = keys_path(folder, unit)
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batch = reader.get_batch(0)
    except (OSError, pa.ArrowInvalid) as error:
        raise ShardError(f"{path} cannot be read ({error}); delete the unit's sidecar, and it is made again") from error
    if not (batch.schema.equals(_SCHEMA) or batch.schema.equals(_SCHEMA.append(_LABELS))):
        raise ShardError(f"{path} is of another version; delete the unit's sidecar, and it is made again")
    metadata = batch.schema.metadata
    ids = batch.column("ids").values.buffers()[1]  # `to_numpy` would make an object of each id
    ordinals = _flat(batch, "ordinals")
    labels = np.full(len(ordinals), None)
    if "labels" in batch.schema.names:
        labels = batch.column("labels").values.to_numpy(zero_copy_only=False)
    return UnitKeys(
        digest=metadata[b"digest"].decode(),
        ordinals=ordinals,
        ids=np.frombuffer(ids, "<u8", 2 * len(ordinals)).reshape(-1, 2),
        signatures=_flat(batch, "signatures").reshape(len(ordinals), int(metadata[b"num_slots"])),
        keys=_flat(batch, "keys"),
        rows=_flat(batch, "rows"),
        labels=labels,
    )


def _flat(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    """The values of a column of one row, without a copy."""
    return batch.column(name).values.to_numpy(zero_copy_only=True)


@dataclass(frozen=True)
class Documents:
    """Documents by number: those of unit i are [starts[i], starts[i + 1]). Columns are read a unit at a time.

    Only one that has not read yet can be sent to another process.
    """

    folder: Path
    units: tuple[str, ...]
    starts: I64  # `(num_units + 1,)`

    @cached_property
    def _open(self) -> Callable[[str], UnitKeys]:
        """The keys of a unit, mapped into memory."""
        return lru_cache(maxsize=_OPEN_UNITS)(partial(open_keys, self.folder))

    def units_of(self, documents: I64) -> I64:
        """Places in the plan of the units that hold the documents, `(n,)`."""
        # "right" passes units without documents.
        return np.searchsorted(self.starts, documents, side="right").astype(np.int64) - 1

    def with_keys(self, first: int, stop: int) -> tuple[U64, I64]:
        """Keys in [first, stop) of all units, stop <= 2**64, and the documents that have them, unit after unit."""
        keys, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for place, start in enumerate(self.starts[:-1]):
            unit = self._open(self.units[place])
            begin = int(np.searchsorted(unit.keys, np.uint64(first)))  # with an int, NumPy would compare floats
            # 2**64 is no uint64.
            end = int(np.searchsorted(unit.keys, np.uint64(stop))) if stop < 2**64 else len(unit.keys)
            keys.append(unit.keys[begin:end].copy())  # a view would keep the file mapped
            numbers.append(unit.rows[begin:end] + start)
        return np.concatenate(keys), np.concatenate(numbers)

    def column(self, name: Literal["ids", "signatures", "ordinals", "labels"], documents: I64) -> NDArray[Any]:
        """A column of `UnitKeys` for documents in any order, `(n, ...)`."""
        order = np.argsort(documents, kind="stable")
        ascending = documents[order]
        places = self.units_of(ascending)
        cuts = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        parts = []
        for start, stop in pairwise(cuts) if len(places) else [(0, 0)]:  # no row, but the column's type
            place = int(places[start]) if len(places) else 0
            column: NDArray[Any] = getattr(self._open(self.units[place]), name)
            parts.append(column[ascending[start:stop] - self.starts[place]])
        gathered = np.concatenate(parts)
        out = np.empty_like(gathered)
        out[order] = gathered
        return out


def number(folder: Path, units: Sequence[str]) -> tuple[Documents, list[str], int]:
    """Numbers the documents of units in plan order; returns them, the digest of every unit's keys, and their number."""
    counts, digests, num_keys = [0], [], 0
    for unit in units:
        keys = open_keys(folder, unit)
        counts.append(len(keys.ordinals))
        digests.append(keys.digest)
        num_keys += len(keys.keys)
    return Documents(folder, tuple(units), np.cumsum(counts, dtype=np.int64)), digests, num_keys
