"""The manifest of several corpora that are read as one."""

from collections import Counter
from collections.abc import Sequence

from declutr.common.storage import hash_json
from declutr.pipeline.shards.manifest import Manifest


def joined_manifest(manifests: Sequence[Manifest]) -> Manifest:
    """The manifest of several corpora that are read as one: all shards, and the sums of their counts.

    Tokenizer, geometry and settings are those of the first; the checks of a run refuse corpora of others.
    """
    if len(manifests) == 1:
        return manifests[0]
    first = manifests[0]
    totals = {key: sum(one.totals[key] for one in manifests) for key in first.totals}
    counts = {name: [getattr(one, name) for one in manifests] for name in ("dropped", "failed", "labels", "notes")}
    return first.model_copy(
        update={
            "shards": [
                shard.model_copy(update={"name": f"{place}/{shard.name}"})
                for place, one in enumerate(manifests)
                for shard in one.shards
            ],
            "ledgers": [],
            "totals": totals | {"longest_tokens": max(one.totals["longest_tokens"] for one in manifests)},
            "config_hash": hash_json([one.config_hash for one in manifests]),
            **{name: dict(sum(map(Counter, some), Counter[str]())) for name, some in counts.items()},
        }
    )
