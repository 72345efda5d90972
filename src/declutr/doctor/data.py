"""Check that every node finds the same prepared shards."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from declutr.common.paths import expand
from declutr.common.storage import hash_file
from declutr.common.stores.address import is_remote
from declutr.common.stores.folder import Folder
from declutr.doctor.finding import EVERYWHERE, Finding, make_finding
from declutr.pipeline.shards.shards import MANIFEST, Manifest, ShardSet

_TRIED = 16  # shards opened on each node, spread over all shards


@dataclass(frozen=True)
class Seen:
    """View of one node: hash of the manifest, documents; or the error."""

    manifest: str = ""
    documents: int = 0
    error: str = ""


def look(folder: str) -> Seen:
    """Read the manifest and a few documents, spread over the shards, as the reading tasks of a run do."""
    try:
        if is_remote(folder):
            return _look_from_afar(folder)
        path = expand(folder)
        shards = ShardSet(path, "train", look=False)
        if shards.num_documents:
            shards.take(np.unique(np.linspace(0, shards.num_documents - 1, _TRIED).astype(np.int64)))
        return Seen(hash_file(path / MANIFEST)[:12], shards.num_documents)
    except (ValueError, OSError) as error:
        return Seen(error=str(error).splitlines()[0])


def _look_from_afar(address: str) -> Seen:
    """Look at shards in a store, without fetching them as a run would."""
    raw = Folder(address).read(MANIFEST) if Folder(address).is_whole() else None
    if raw is None:
        return Seen(error=f"{address}: no complete folder of shards found; send it: declutr copy FOLDER {address}")
    return Seen(hashlib.sha256(raw).hexdigest()[:12], Manifest.model_validate_json(raw).totals["kept_train"])


def check(folder: str, found: Mapping[str, Seen]) -> list[Finding]:
    """Check that all nodes see the same shards."""
    name = f"{folder} readable"
    remedy = "mount the shared folder on this node, or prepare the corpus to its end"
    broken = [
        make_finding(name, node, seen.error, fail=True, remedy=remedy) for node, seen in found.items() if seen.error
    ]
    whole = {node: seen for node, seen in found.items() if not seen.error}
    kinds = {seen.manifest for seen in whole.values()}
    holders = {seen: ", ".join(n for n, other in whole.items() if other == seen) for seen in whole.values()}
    words = "; ".join(f"{s.documents} documents (manifest {s.manifest}) on {who}" for s, who in holders.items())
    if whole:
        remedy = "the nodes have copies that differ: use one shared folder, or the same copy everywhere"
        broken.append(make_finding(name, EVERYWHERE, words, fail=len(kinds) > 1, remedy=remedy))
    return broken
