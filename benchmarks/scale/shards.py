"""A made-up folder of very many shards: a manifest of the real schema, and real files that share their bytes."""

import os
from pathlib import Path

import numpy as np

from declutr.common.storage import write_text
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.ledger import LedgerFile
from declutr.pipeline.shards.manifest import MANIFEST, Counts, Shard, Sidecar, build_manifest
from declutr.pipeline.shards.schema import shard_schema
from declutr.pipeline.shards.windows import Geometry
from declutr.pipeline.shards.writer import ShardWriter
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

_GEOMETRY = Geometry(num_anchors=1, max_tokens=4)
_TOKENS = 8
_LINKS = 60_000  # names per file: ext4 allows 65,000
TOKENIZER = TokenizerInfo(
    kind="train",
    fingerprint="made up",
    vocab_size=1000,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=1,
    mask_token_id=4,
    unk_token_id=3,
    special_ids=[0, 1, 2, 3, 4],
)
"""Tokenizer facts that shards need, without any text."""


def make_shards(folder: Path, num_shards: int, shard_documents: int) -> None:
    """Write one short shard and give it many names; the manifest lists them as `prepare` would.

    Names are links to the same bytes, so that 10**9 documents need megabytes. Opening, finding and copying documents
    costs the same as in a real folder whose files are cached.
    """
    folder.mkdir(parents=True)
    shard = _write(folder, shard_documents)
    first = folder / shard.name
    sidecars = []
    for number in range(num_shards):
        name = f"train-{number:06d}.arrow"
        if number and number % _LINKS == 0:
            fresh = folder / name
            fresh.write_bytes(first.read_bytes())
            first = fresh
        elif number:
            os.link(first, folder / name)
        else:
            first = first.rename(folder / name)
        sidecars.append(_sidecar(shard.model_copy(update={"name": name}), number))
    manifest = build_manifest(sidecars, TOKENIZER, _GEOMETRY, {}, "made up")
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=1))


def _write(folder: Path, documents: int) -> Shard:
    schema = shard_schema(TOKENIZER.vocab_size, _GEOMETRY, TOKENIZER.fingerprint)
    tokens = np.arange(_TOKENS, dtype=np.uint32)
    with ShardWriter(folder, "original", "train", schema, 1000) as writer:
        for number in range(documents):
            writer.add(document_id(b"%d" % number), tokens, "made up", number)
    (shard,) = writer.result()
    return shard


def _sidecar(shard: Shard, number: int) -> Sidecar:
    rows = shard.num_documents
    ledger = LedgerFile(name=f"ledger/{number:06d}.arrow", num_rows=rows, num_bytes=1, sha256="0" * 64)
    counts = Counts(read=rows, kept=rows, dropped={}, failed={}, text_bytes=0, longest_tokens=_TOKENS)
    return Sidecar(
        unit=f"{number:06d}",
        unit_hash="",
        config_hash="",
        num_bytes=1,
        counts=counts,
        failures=[],
        shards=[shard],
        ledger=ledger,
    )
