"""The search on Ray Data or over an object store: one task and one result file a bucket, so that it can continue."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from declutr.common.cluster import SessionConfig
from declutr.common.console.logs import get_logger
from declutr.common.errors import ShardError
from declutr.common.paths import expand
from declutr.common.session import start_ray
from declutr.common.storage import Files, atomic_file, hash_json
from declutr.common.stores.folder import Folder
from declutr.pipeline.duplicates.config import DuplicatesConfig
from declutr.pipeline.duplicates.keys import Documents, Numbering, number
from declutr.pipeline.duplicates.pairs import (
    COLUMNS,
    DUPLICATES,
    STAMP,
    DuplicatePairs,
    bucket_pairs,
    decide,
    join,
    stamp_of,
    write_duplicates,
)

PAIRS = "pairs"
"""Folder of the pairs of the buckets."""
KEYS_PER_BUCKET = 1 << 22
"""Keys that a task sorts, about 300 MB at its peak. With the corpus it decides the number of buckets."""
_VERSION = 1
_JOINED = 1 << 22  # pairs that are collected before repeats among them are removed
_THREADS = 8


@dataclass(frozen=True)
class RemoteKeys:
    """Keys in an object store. Each host that searches has one copy of all of them, and sends the pairs that it finds.

    Every method raises RemoteError if the store refuses, or did not answer in time.
    """

    remote: Folder
    """Folder of the candidates."""
    files: Files
    """The keys of all units, by name from there."""
    cache: str
    """Folder for copies, which each host expands."""

    def copy(self) -> Path:
        """This host's copy of the keys, fetched at the first use.

        Raises:
            AlteredError: a file is missing or altered.
        """
        return self.remote.cached(expand(self.cache).absolute(), self.files)

    def fetch_pairs(self, folder: Path) -> None:
        """Fetches the pairs that the store has and the host does not."""
        pairs = self.remote / PAIRS
        missing = [name for name in pairs.names() if not (folder / PAIRS / name).exists()]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: pairs.pull(name, folder / PAIRS / name), missing))


def find_duplicates(
    folder: Path,
    units: Sequence[str],
    config: DuplicatesConfig,
    session: SessionConfig | None = None,
    keys: RemoteKeys | None = None,
    labels: list[str] | None = None,
) -> Path:
    """Finds the documents to drop; continues an earlier search that was stopped.

    Args:
        folder: the output folder, with a file of keys for every unit (`write_keys`).
        units: names of the units in plan order, which is the order of the corpus.
        config: settings, the same as those of the keys.
        session: where the work runs; without influence on the result.
        keys: the keys in a store, if hosts share no folder; `folder` is then this host's copy.
        labels: labels whose rows are kept, which the result records; None: all.

    Returns:
        Path of `duplicates.arrow` (pipeline/duplicates/pairs.py). Its bytes depend only on keys and settings.

    Raises:
        ShardError: a file of keys is missing, damaged, or was written with other settings.
    """
    result = folder / DUPLICATES
    numbering, digests, num_keys = number(folder, units, config)
    num_buckets = max(1, -(-num_keys // KEYS_PER_BUCKET))
    made_from = [_VERSION, config.model_dump(mode="json"), num_buckets, list(zip(units, digests, strict=True))]
    made_from += [] if labels is None else [labels]
    stamp = hash_json(made_from)
    if stamp_of(result) == stamp:
        return result
    for aside in (folder / PAIRS).glob(".*.tmp"):
        aside.unlink()
    if keys is not None:
        keys.fetch_pairs(folder)
    for left in (folder / PAIRS).glob("*.arrow"):  # left by other settings with more buckets
        if int(left.stem) >= num_buckets:
            left.unlink()
    todo = [bucket for bucket in range(num_buckets) if stamp_of(pairs_path(folder, bucket)) != stamp]
    if len(todo) < num_buckets:
        get_logger().info("%d of %d buckets are searched already", num_buckets - len(todo), num_buckets)
    write = partial(_write_pairs, config=config, num_buckets=num_buckets, stamp=stamp)
    if num_buckets == 1 and todo:  # starting a task would take longer than the search
        write(0, numbering)
    elif todo:
        session = session or SessionConfig()
        start_ray(session.num_cpus, session.address)
        rows = ray.data.from_items([{"bucket": bucket} for bucket in todo], override_num_blocks=len(todo))
        arguments = {"numbering": numbering, "write": write, "keys": keys}
        for done in rows.map(search_bucket, fn_kwargs=arguments, num_cpus=1).iter_rows():
            if done["problem"]:
                raise ShardError(f"bucket {done['bucket']}: {done['problem']}")
        if keys is not None:
            keys.fetch_pairs(folder)
    pairs = _read_all([pairs_path(folder, bucket) for bucket in range(num_buckets)])
    write_duplicates(result, decide(pairs), Documents(numbering), stamp, labels)
    return result


def pairs_path(folder: Path, bucket: int) -> Path:
    """Path of the pairs of a bucket."""
    return folder / PAIRS / f"{bucket:05d}.arrow"


def search_bucket(
    row: dict[str, int], numbering: Numbering, write: Callable[[int, Numbering], None], keys: RemoteKeys | None = None
) -> dict[str, Any]:
    """Writes the pairs of a bucket, or returns an error message; Ray Data maps this function over buckets."""
    bucket = int(row["bucket"])
    try:
        if keys is not None:
            numbering = replace(numbering, folder=keys.copy())
        write(bucket, numbering)
        if keys is not None:
            path = pairs_path(numbering.folder, bucket)
            keys.remote.put(f"{PAIRS}/{path.name}", path)
    except (OSError, ShardError) as error:
        return {"bucket": bucket, "problem": str(error)}
    return {"bucket": bucket, "problem": ""}


def _write_pairs(bucket: int, numbering: Numbering, config: DuplicatesConfig, num_buckets: int, stamp: str) -> None:
    pairs = bucket_pairs(Documents(numbering), config, bucket, num_buckets)
    batch = pa.record_batch({name: pa.array(getattr(pairs, name)) for name in COLUMNS})
    batch = batch.replace_schema_metadata({STAMP: stamp})
    path = pairs_path(numbering.folder, bucket)
    with atomic_file(path) as aside, pa.ipc.new_file(str(aside), batch.schema) as stream:
        stream.write_batch(batch)


def _read_all(paths: Sequence[Path]) -> DuplicatePairs:
    """The pairs of all buckets. Most pairs share several bands and therefore occur in several buckets."""
    joined = join([])
    parts: list[DuplicatePairs] = []
    for path in paths:
        batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        parts.append(DuplicatePairs(*(batch.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS)))
        if sum(map(len, parts)) > max(_JOINED, len(joined)):
            joined, parts = join([joined, *parts]), []
    return join([joined, *parts])
