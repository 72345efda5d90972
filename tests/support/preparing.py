"""Settings of small preparations, a preparation in this process, and checksums of what was written."""

import json

from mediafiles import spread

from declutr.common.storage import hash_file
from declutr.pipeline.config import PipelineConfig, config_hash, identity
from declutr.pipeline.duplicates.pairs import DUPLICATES
from declutr.pipeline.duplicates.search import find_duplicates
from declutr.pipeline.job.units import UnitReader, plan_units
from declutr.pipeline.job.worker import CANDIDATES, most_frequent_labels, write_selected, write_unit
from declutr.pipeline.readers.skipped import Skipped
from declutr.pipeline.shards.ledger import ledger_entries
from declutr.pipeline.shards.manifest import MANIFEST, build_manifest
from declutr.pipeline.shards.shards import check_shards
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer, train_tokenizer

DOCUMENTS = {"geometry": {"num_anchors": 1, "max_tokens": 32}, "unit_mib": 0.1, "record_batch_rows": 20}
DOCUMENTS["tokenizer"] = {"kind": "train", "vocab_size": 400, "sample_mib": 0.1}


def values_of(corpus, output, **changes):
    """Settings as in a file: the corpus is a folder, a fifth is held out."""
    files = {"output": str(output), "corpus": {"kind": "files", "paths": [str(corpus)]}}
    return files | {"validation_fraction": 0.2, "record_batch_rows": 16} | changes


def config_of(corpus, output, **changes):
    return PipelineConfig.model_validate(values_of(corpus, output, **DOCUMENTS) | changes)


def checksums(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "progress.jsonl"]
    return {str(path.relative_to(folder)): hash_file(path) for path in files}


def prepare_here(config, folder, tokenizer):
    """Prepares all units in this process: the manifest and the ledger."""
    skipped = Skipped()
    units, problems = plan_units(config.corpus, config.unit_mib, skipped, config.content)
    assert problems == []
    sidecars = [write_unit(unit, folder, config, tokenizer) for unit in units]
    if config.duplicates.enabled:
        names, labels = [unit.name for unit in units], most_frequent_labels(sidecars, config.content)
        find_duplicates(folder / CANDIDATES, names, config.duplicates, labels=labels).replace(folder / DUPLICATES)
        sidecars = [write_selected(unit, folder, config, tokenizer) for unit in units]
    facts = config.geometry, identity(config), config_hash(config), skipped.kinds()
    manifest = build_manifest(sidecars, tokenizer, *facts)
    (folder / MANIFEST).write_text(manifest.model_dump_json())
    assert check_shards(folder, full=True) == []
    ledger = [entry for path in sorted((folder / "ledger").glob("*.arrow")) for entry in ledger_entries(path)]
    totals = manifest.totals
    assert totals["read"] == len(ledger) == totals["kept"] + totals["dropped"] + totals["failed"]
    return manifest, ledger


def prepare_rows(folder, content, rows, texts=None, **settings):
    """A folder of shards of these records, and its manifest; the tokenizer knows `texts`, else the rows."""
    folder.mkdir()
    own = (value for row in rows for value in row.values() if isinstance(value, str))
    tokenizer = train_tokenizer(own if texts is None else iter(texts), 400)
    tokenizer.save_pretrained(str(folder / "out" / "tokenizer"))
    settings = {"tokenizer": {"kind": "train", "vocab_size": 400}} | settings
    corpus = write_jsonl(folder / "in.jsonl", *rows)
    return _prepared(folder, corpus, describe_tokenizer(tokenizer, "train"), content=content, **settings)


def prepare_media(folder, content, files):
    (folder / "out").mkdir(parents=True)
    return _prepared(folder, spread(folder / "in", files), None, content=content)


def _prepared(folder, corpus, facts, **settings):
    settings = {"duplicates": {"exact": False}} | settings
    config = PipelineConfig.model_validate(values_of(corpus, folder / "out", **settings))
    return folder / "out", prepare_here(config, folder / "out", facts)[0]


def rows_of(config):
    units, problems = plan_units(config.corpus, config.unit_mib, None, config.content)
    assert problems == []
    return [record for unit in units for record in UnitReader(unit, config.corpus, config.content)]


def write_jsonl(path, *rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines))
    return path


def make_pair(premise, hypothesis, label):
    return {"premise": premise, "hypothesis": hypothesis, "label": label}
