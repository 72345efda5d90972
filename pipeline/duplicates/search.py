"""The search on Ray Data, one task a bucket of keys, with the same result whatever the tasks, their order and hosts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from declutr.common.cluster import SessionConfig
from declutr.common.errors import ShardError
from declutr.common.session import start_ray
from declutr.common.storage import hash_json
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.keys import Documents, number
from declutr.pipeline.duplicates.pairs import (
    COLUMNS,
    DUPLICATES,
    DuplicatePairs,
    bucket_pairs,
    decide,
    join,
    write_duplicates,
)

# Keys that a task sorts, about 300 MB at its peak. With the corpus it decides the number of buckets.
KEYS_PER_BUCKET = 1 << 22
_VERSION = 1  # of the search: another one gives another stamp
_JOINED = 1 << 22  # pairs that are collected before repeats among them are removed


def find_duplicates(
    folder: Path,  # the output folder, with a file of keys for every unit (`write_keys`)
    units: Sequence[str],  # names of the units in plan order, which is the order of the corpus
    config: DuplicatesConfig,  # settings, the same as those of the keys
    session: SessionConfig | None = None,  # where the work runs; without influence on the result
    # Called on each host, if hosts share no folder: gives the host's copy of the keys. `folder` is then this host's.
    host_keys: Callable[[], Path] | None = None,
    labels: list[str] | None = None,  # labels whose rows are kept, which the result records; None: all
) -> Path:
    """Finds the documents to drop; returns `duplicates.arrow`, whose bytes depend only on keys and settings."""
    result = folder / DUPLICATES
    documents, digests, num_keys = number(folder, units)
    num_buckets = max(1, -(-num_keys // KEYS_PER_BUCKET))
    made_from = [_VERSION, config.model_dump(mode="json"), num_buckets, list(zip(units, digests, strict=True))]
    made_from += [] if labels is None else [labels]
    stamp = hash_json(made_from)
    if num_buckets == 1:  # starting a task would take longer than the search
        pairs = _join_all([search_bucket({"bucket": 0}, documents, config, num_buckets)])
    else:
        session = session or SessionConfig()
        start_ray(session.num_cpus, session.address)
        rows = ray.data.from_items(
            [{"bucket": bucket} for bucket in range(num_buckets)], override_num_blocks=num_buckets
        )
        arguments = {"documents": documents, "config": config, "num_buckets": num_buckets, "host_keys": host_keys}
        pairs = _join_all(rows.map(search_bucket, fn_kwargs=arguments, num_cpus=1).iter_rows())
    write_duplicates(result, decide(pairs), documents, stamp, labels)
    return result


def search_bucket(
    row: dict[str, int],
    documents: Documents,
    config: DuplicatesConfig,
    num_buckets: int,
    host_keys: Callable[[], Path] | None = None,
) -> dict[str, Any]:
    """The bytes of the columns of a bucket's pairs, or an error message; Ray Data maps this function over buckets."""
    bucket = int(row["bucket"])
    try:
        documents = replace(documents, folder=host_keys() if host_keys else documents.folder)
        pairs = bucket_pairs(documents, config, bucket, num_buckets)
    except (OSError, ShardError) as error:  # raised here, users would see it as a traceback of Ray
        return {"problem": f"bucket {bucket}: {error}", **dict.fromkeys(COLUMNS, b"")}
    # Bytes, because rows with arrays of different lengths have no common type in Arrow.
    return {"problem": "", **{name: getattr(pairs, name).tobytes() for name in COLUMNS}}


def _join_all(buckets: Iterable[dict[str, Any]]) -> DuplicatePairs:
    """The pairs of all buckets. Most pairs share several bands and therefore occur in several buckets."""
    joined = join([])
    parts: list[DuplicatePairs] = []
    for row in buckets:
        if row["problem"]:
            raise ShardError(row["problem"])
        columns = {name: np.frombuffer(row[name], getattr(joined, name).dtype) for name in COLUMNS}
        parts.append(DuplicatePairs(**columns))
        if sum(map(len, parts)) > max(_JOINED, len(joined)):  # the driver holds each pair about once
            joined, parts = join([joined, *parts]), []
    return join([joined, *parts])
