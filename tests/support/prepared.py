"""Prepared folders made document by document, by the writers that `prepare` uses, with the statuses of a test."""

from dataclasses import dataclass

from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.job.units import Unit, UnitWriter
from declutr.pipeline.readers.corpus import Part, document_id
from declutr.pipeline.shards.ledger import Entry
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.tokenizer.batch_tokenizer import BatchTokenizer
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Row:
    """A document as it was read, and what became of it. A failure has the text None."""

    text: str | None
    status: str = "train"
    source: str = "a.jsonl"
    detail: str | None = None
    language: str | None = None
    tokenized: bool = True


def write_prepared(folder, units, **settings):
    """Writes shards, ledgers, rejected documents, tokenizer and manifest; offsets are the places in each unit."""
    values = {"output": str(folder), "corpus": {"kind": "files", "paths": ["a.jsonl"]}, "write_rejected": True}
    values |= {"tokenizer": {"kind": "train", "vocab_size": 400, "sample_mib": 0.1}}
    values |= {"geometry": {"num_anchors": 1, "max_tokens": 16}}
    config = PipelineConfig.model_validate(values | settings)
    trained = train_tokenizer((row.text for unit in units for row in unit if row.text), 400)
    trained.save_pretrained(str(folder / "tokenizer"))
    tokenizer, encoder = describe_tokenizer(trained, "train"), BatchTokenizer.load(folder / "tokenizer")
    sidecars = []
    for number, rows in enumerate(units):
        part = Part(format="jsonl", path="a.jsonl", source="a.jsonl", start=0, stop=1, num_bytes=1000, weight=1000)
        with UnitWriter(folder, Unit(name=f"{number:05d}", parts=[part]), config, tokenizer) as writer:
            for offset, row in enumerate(rows):
                text = row.text or ""
                identity_ = None if row.text is None else document_id(text.encode())
                tokens = encoder.encode([text])[0]
                num_tokens = len(tokens) if identity_ and row.tokenized else None
                facts = len(text.encode()), num_tokens, row.language, row.status, None, row.detail
                entry = Entry(identity_, row.source, offset, *facts)
                if row.status in ("train", "held-out"):
                    writer.keep(entry, tokens)
                else:
                    writer.reject(entry, text)
        sidecars.append(writer.finish())
    manifest = build_manifest(sidecars, tokenizer, config.geometry, identity(config), config_hash(config))
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    return manifest
