"""Shards of documents and of short texts, prepared without Ray."""

import json

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer


def prepare_rows(folder, content, rows, texts=None, **settings):
    """A folder of shards of these records, made by `prepare`'s own functions; returns it and its manifest.

    The tokenizer is trained on `texts`, if given, else on the records.
    """
    folder.mkdir()
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = PipelineConfig.model_validate(
        {
            "output": str(folder / "out"),
            "corpus": {"kind": "files", "paths": [str(folder / "in.jsonl")]},
            "tokenizer": {"kind": "train", "vocab_size": 400},
            "content": content,
            "validation_fraction": 0.2,
            "duplicates": {"exact": False},
            **settings,
        }
    )
    own = (value for row in rows for value in row.values() if isinstance(value, str))
    tokenizer = train_tokenizer(own if texts is None else iter(texts), 400)
    tokenizer.save_pretrained(str(folder / "out" / "tokenizer"))
    info = describe_tokenizer(tokenizer, "train")
    (unit,), _ = plan_units(config.corpus, config.unit_mib, None, config.content)
    sidecar = write_unit(unit, folder / "out", config, info)
    manifest = build_manifest([sidecar], info, config.geometry, identity(config), config_hash(config))
    (folder / "out" / MANIFEST).write_text(manifest.model_dump_json())
    return folder / "out", manifest
