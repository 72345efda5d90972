"""A small folder of shards, written without `prepare`, and changes to the bytes of shards."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from declutr.common.storage import hash_file
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.ledger import Entry, LedgerWriter
from declutr.pipeline.shards.manifest import Counts, Sidecar, build_manifest, load_manifest
from declutr.pipeline.shards.windows import Geometry
from declutr.pipeline.shards.writer import ShardWriter, shard_schema
from declutr.pipeline.tokenizer.tokenization import TokenizerInfo

# facts of a tokenizer that shards need, without any text
_IDS = {f"{name}_token_id": token for token, name in enumerate(("bos", "pad", "eos", "unk", "mask"))}
TOKENIZER = TokenizerInfo(kind="train", fingerprint="made up", vocab_size=1000, special_ids=[0, 1, 2, 3, 4], **_IDS)
GEOMETRY = Geometry(num_anchors=1, max_tokens=4)
LENGTHS = [8 + number % 13 for number in range(57)]


def tokens_of(number, vocab_size=1000):
    return (np.arange(LENGTHS[number], dtype=np.uint32) * 31 + number) % vocab_size


def write(folder, vocab_size=1000, units=3):
    """57 documents in three shards of blocks of 5."""
    folder.mkdir(exist_ok=True)
    schema, sidecars = shard_schema(vocab_size, GEOMETRY, TOKENIZER.fingerprint), []
    for unit in range(units):
        name = f"{unit:05d}"
        with ShardWriter(folder, name, "train", schema, 5) as writer, LedgerWriter(folder, name) as ledger:
            for number in range(unit * 19, (unit + 1) * 19):
                identity, tokens = document_id(b"%d" % number), tokens_of(number, vocab_size)
                assert writer.add(identity, tokens, "s", number) == number % 19
                ledger.add(Entry(identity, "s", number, 0, len(tokens), None, "train", number % 19, None))
        counts = Counts(read=19, kept=19, dropped={}, failed={}, text_bytes=0, longest_tokens=20)
        facts = {"unit": name, "unit_hash": "", "config_hash": "", "num_bytes": 1, "counts": counts, "failures": []}
        sidecars.append(Sidecar(**facts, shards=writer.result(), ledger=ledger.result()))
    manifest = build_manifest(sidecars, TOKENIZER.model_copy(update={"vocab_size": vocab_size}), GEOMETRY, {}, "")
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


def poke(column, place, changed):
    """Changes numbers of the first record batch where they lie in the file."""
    which, dtype = place
    dtype = dtype or (np.uint16 if column == "tokens" else np.int32)

    def change(raw):
        whole = pa.py_buffer(raw)
        buffer = pa.ipc.open_file(whole).get_batch(0).column(column).buffers()[which]
        start = buffer.address - whole.address
        numbers = np.frombuffer(raw, dtype, buffer.size // np.dtype(dtype).itemsize, start)
        numbers[[*changed]] = [*changed.values()]
        return raw

    return change


def spoil(folder, change, name="train-00001.arrow"):
    """Changes the bytes of a shard, and the manifest so that it agrees."""
    path = folder / name
    path.write_bytes(change(bytearray(path.read_bytes())))
    manifest, facts = load_manifest(folder), {"num_bytes": path.stat().st_size, "sha256": hash_file(path)}
    shards = [replace(shard, **(facts if shard.name == name else {})) for shard in manifest.shards]
    (folder / "manifest.json").write_text(manifest.model_copy(update={"shards": shards}).model_dump_json())
