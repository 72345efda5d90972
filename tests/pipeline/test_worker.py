import json
import os

import numpy as np
import pytest

from declutr.pipeline.config import identity
from declutr.pipeline.job.unit_writer import finished_sidecar, sidecar_path
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import splits_of, write_unit
from declutr.pipeline.readers.corpus import document_id
from declutr.pipeline.shards.manifest import build_manifest
from declutr.pipeline.shards.shards import ShardSet


@pytest.fixture
def corpus(tmp_path):
    texts = [" ".join(f"word{number} {i}" for i in range(30)) for number in range(40)]
    lines = [json.dumps({"text": text}).encode() for text in [*texts, "short", " ", texts[0].replace(" ", "\n")]]
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([*lines, b'"\xff"']))
    return path


def test_a_unit_accounts_for_every_document(corpus, make_config, output):
    folder, tokenizer = output
    config = make_config(corpus)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    assert finished_sidecar(unit, folder, config) is None
    sidecar = write_unit(unit, folder, config, tokenizer)
    assert sidecar.counts.read == 44
    assert sidecar.counts.kept == 41
    assert sidecar.counts.dropped == {"empty": 1, "too_short": 1}
    assert sidecar.counts.failed == {"invalid_utf8": 1}
    assert [(failure.source, failure.reason) for failure in sidecar.failures] == [("corpus.jsonl", "invalid_utf8")]
    assert {shard.split for shard in sidecar.shards} == {"train", "held-out"}
    assert sum(shard.num_documents for shard in sidecar.shards) == 41
    assert finished_sidecar(unit, folder, config) == sidecar


def test_a_unit_is_redone_when_its_shard_settings_or_input_are_not_the_same(corpus, make_config, output):
    folder, tokenizer = output
    config = make_config(corpus)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar = write_unit(unit, folder, config, tokenizer)
    assert finished_sidecar(unit, folder, make_config(corpus, seed=1)) is None
    damaged, whole = folder / sidecar.shards[0].name, (folder / sidecar.shards[0].name).read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    later = sidecar_path(folder, unit.name).stat().st_mtime_ns + 10**9
    os.utime(damaged, ns=(later, later))
    assert finished_sidecar(unit, folder, config) is None
    damaged.write_bytes(whole)
    os.utime(damaged, ns=(later, later))
    assert finished_sidecar(unit, folder, config) == sidecar, "copied, for example"
    with corpus.open("ab") as stream:
        stream.write(b"\n{}")
    (longer,), _ = plan_units(config.corpus, config.unit_mib)
    assert finished_sidecar(longer, folder, config) is None
    shard = folder / sidecar.shards[0].name
    shard.write_bytes(shard.read_bytes()[:-1])
    assert finished_sidecar(unit, folder, config) is None


@pytest.mark.parametrize(("mode", "least"), [("drop", 64), ("fewer_anchors", 32), ("shrink_spans", 20)])
def test_short_documents_are_kept_with_windows_of_their_own(tmp_path, make_config, output, tokenizer, mode, least):
    """Two anchors of 16 tokens need 64; one needs 32; two of 5 need 20."""
    folder, info = output
    corpus = tmp_path / "corpus.txt"
    texts = [" ".join(f"span{number % (1 + i)}" for i in range(number)) for number in range(1, 60)]
    corpus.write_text("\n".join(texts))
    geometry = {"num_anchors": 2, "max_tokens": 16, "min_tokens": 5}
    config = make_config(corpus, validation_fraction=0, geometry=geometry, short_documents=mode)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar = write_unit(unit, folder, config, info)
    lengths = [len(tokenizer(" " + text, add_special_tokens=False)["input_ids"]) for text in texts]
    kept = [length for length in lengths if length >= least]
    assert sidecar.counts.dropped == {"too_short": len(texts) - len(kept)}
    manifest = build_manifest([sidecar], info, config.geometry, identity(config), "")
    assert manifest.short_documents == mode
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    table = ShardSet(folder, "train").take(np.arange(len(kept)))
    assert table.column("num_tokens").to_pylist() == kept
    for length, windows in zip(kept, table.column("windows").to_pylist(), strict=True):
        size = min(16, length // 4) if mode == "shrink_spans" else 16
        assert windows == list(range(0, length - size + 1, size))


def test_the_split_is_by_content_and_of_the_asked_size(make_config, tmp_path):
    config = make_config(tmp_path, validation_fraction=0.2)
    ids = [document_id(b"%d" % number) for number in range(5000)]
    splits = splits_of(ids, config)
    assert 0.18 < splits.count("held-out") / 5000 < 0.22
    assert splits == [split for identity in ids for split in splits_of([identity], config)]
    assert splits_of([], config) == []
    assert set(splits) != {"held-out"}
    other = make_config(tmp_path, validation_fraction=0.2, seed=1)
    assert splits != splits_of(ids, other)
    none = make_config(tmp_path, validation_fraction=0)
    assert set(splits_of(ids, none)) == {"train"}


def test_shards_can_be_read_as_they_were_written(corpus, make_config, output, tokenizer):
    folder, info = output
    config = make_config(corpus, validation_fraction=0)
    (unit,), _ = plan_units(config.corpus, config.unit_mib)
    sidecar = write_unit(unit, folder, config, info)
    manifest = build_manifest([sidecar], info, config.geometry, {}, "")
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    table = ShardSet(folder, "train").take([40, 0])
    assert table.column("id")[0] == table.column("id")[1]  # the same words in other whitespace
    assert table.column("offset").to_pylist()[1] == 0
    assert tokenizer.decode(table.column("tokens")[1].as_py()) == " " + " ".join(f"word0 {i}" for i in range(30))
