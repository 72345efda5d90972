"""The result: `duplicates.arrow`, one row for every document to drop, sorted by (unit in plan order, ordinal).

| column       | type                    | meaning                                                          |
|--------------|-------------------------|------------------------------------------------------------------|
| unit         | dictionary<string>      | the dropped document's unit                                      |
| ordinal      | int32                   | its number among the unit's records                              |
| kept_unit    | dictionary<string>      | unit of the kept document                                        |
| kept_ordinal | int32                   |                                                                  |
| kept_id      | fixed_size_binary(16)   |                                                                  |
| kind         | dictionary<string>      | exact: equal texts; near: verified to be similar                 |
| similarity   | float                   | 1 for exact, else the share of equal slots                       |
| cluster_size | int64                   | documents that the kept one represents, including itself         |
| kept_label   | string                  | the kept one's label if the copy has another, else null; no      |
|              |                         | column if all labels agree                                       |
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from declutr.common.storage import atomic_file
from declutr.pipeline.duplicates.documents import I64, Documents
from declutr.pipeline.duplicates.pairs import Decisions
from declutr.pipeline.readers.corpus import ID_BYTES

DUPLICATES = "duplicates.arrow"
KINDS = ("near", "exact")
OTHER_LABEL = "duplicate_other_label"
"""Reason of an exact copy whose label differs from that of the kept row."""
STAMP = b"stamp"
"""Metadata key for the hash of the inputs and settings of a file."""
LABELS = b"labels"
"""Metadata key for the labels whose rows are kept, as JSON."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A document to drop, and the kept document that it duplicates."""

    unit: str
    ordinal: int
    kept_unit: str
    kept_ordinal: int
    kept_id: bytes
    kind: Literal["exact", "near"]
    similarity: float
    cluster_size: int
    kept_label: str | None = None
    """The kept one's label if it differs."""


def write_duplicates(
    path: Path, decisions: Decisions, documents: Documents, stamp: str, labels: list[str] | None = None
) -> None:
    """Writes the table, whole or not at all; its metadata have the labels whose rows are kept, if not all are."""
    units = pa.array(documents.numbering.units, pa.string())
    kinds = pa.array(KINDS, pa.string())
    ids = np.ascontiguousarray(documents.ids(decisions.kept))
    count = len(decisions.dropped)
    columns = {
        "unit": _coded(documents.numbering.units_of(decisions.dropped), units),
        "ordinal": pa.array(documents.ordinals(decisions.dropped)),
        "kept_unit": _coded(documents.numbering.units_of(decisions.kept), units),
        "kept_ordinal": pa.array(documents.ordinals(decisions.kept)),
        "kept_id": pa.Array.from_buffers(pa.binary(ID_BYTES), count, [None, pa.py_buffer(ids)]),
        "kind": pa.DictionaryArray.from_arrays(pa.array(decisions.exact.astype(np.int8)), kinds),
        "similarity": pa.array(decisions.similarity),
        "cluster_size": pa.array(decisions.cluster_size),
    }
    if any(other_labels := documents.other_labels(decisions.kept, decisions.dropped)):
        columns["kept_label"] = pa.array(other_labels, pa.string())
    batch = pa.record_batch(columns)
    kept = {} if labels is None else {LABELS: json.dumps(labels)}
    batch = batch.replace_schema_metadata({STAMP: stamp, **kept})
    with atomic_file(path) as aside, pa.ipc.new_file(str(aside), batch.schema) as stream:
        stream.write_batch(batch)


def _coded(places: I64, names: pa.Array) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), names)


def stamp_of(path: Path) -> str | None:
    """Hash of the inputs of an Arrow file, from its metadata; None if the file is missing or damaged."""
    try:
        schema = pa.ipc.open_file(pa.memory_map(str(path))).schema
    except (OSError, pa.ArrowInvalid):
        return None
    stamp = (schema.metadata or {}).get(STAMP)
    return stamp.decode() if stamp else None


def removed(folder: Path, unit: str) -> dict[int, Duplicate]:
    """The documents to drop from a unit, by ordinal. Reads only the unit's rows.

    Raises:
        FileNotFoundError: the search is not finished.
    """
    batch = pa.ipc.open_file(pa.memory_map(str(folder / DUPLICATES))).get_batch(0)
    column = batch.column("unit")
    place = column.dictionary.index(unit).as_py()
    if place < 0:
        return {}
    codes = column.indices.to_numpy(zero_copy_only=True)
    start, stop = np.searchsorted(codes, [place, place + 1])
    rows = batch.slice(start, stop - start).to_pylist()
    return {row["ordinal"]: Duplicate(**row) for row in rows}


def kept_labels(folder: Path) -> frozenset[str] | None:
    """The labels whose rows are kept; None: all.

    Raises:
        FileNotFoundError: the search is not finished.
    """
    labels_json = (pa.ipc.open_file(pa.memory_map(str(folder / DUPLICATES))).schema.metadata or {}).get(LABELS)
    return None if labels_json is None else frozenset(json.loads(labels_json))
