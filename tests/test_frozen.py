"""What must never change: order, spans, masks, dropout keys and shards, by the digests of cb156041 (`frozen.json`).

A difference means that runs and shards of earlier versions no longer mean the same. What depends on the processor is
compared by `make frozen`.
"""

import gzip
import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tinyruns as runs
import torch
from textruns import PAIRS, write_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from declutr.common import seeding
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.job.units import plan_units
from declutr.pipeline.job.worker import write_unit
from declutr.pipeline.tokenizer.tokenization import describe_tokenizer
from declutr.trainer.data.packing import MaskingConfig, Vocabulary, mask_tokens
from declutr.trainer.data.plan import Plan
from declutr.trainer.model import dropout
from declutr.trainer.objectives.config import SpanConfig
from declutr.trainer.objectives.declutr.spans import draw, place

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
FROZEN = json.loads(Path(__file__).with_name("frozen.json").read_text())
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}


def digest(*arrays):
    total = hashlib.sha256()
    for array in map(np.asarray, arrays):
        total.update(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return total.hexdigest()[:16]


def order():
    several = Plan(4, 700, 24, sizes=(500, 200), shares=(3, 2))
    plans = [Plan(3, 1000, 16), several, Plan(5, 97, 6, canonical_documents=2)]
    return digest(*itertools.chain.from_iterable(plan.documents(0, 150) for plan in plans))


def spans():
    sizes = np.arange(64, 564, dtype=np.int64)
    windows = [np.arange(0, size - size % 16, 16) for size in sizes]
    offsets, digests = np.concatenate([[0], np.cumsum([len(w) for w in windows])]), []
    for strategy in ("subsuming", "adjacent", "distant", "all"):
        config = SpanConfig(num_anchors=2, num_positives=2, min_tokens=4, max_tokens=16, strategy=strategy)
        draws = draw(config, 7, np.arange(500) % 3, np.arange(500, dtype=np.uint64))
        chosen = place(config, draws, sizes, np.concatenate(windows), offsets, "drop")
        digests.append(digest(chosen.anchors, chosen.positives, chosen.present))
    return digests


def masks():
    ids = np.arange(4000, dtype=np.int64) % 900 + 10
    key, epoch = (np.arange(4000) // 50).astype(np.uint64), np.full(4000, 2, np.uint64)
    anchor, position = np.arange(4000) // 25 % 2, np.arange(4000) % 25
    vocabulary = Vocabulary(910, None, None, 4, tuple(range(5)))
    return digest(*mask_tokens(MaskingConfig(), 9, vocabulary, ids, key, epoch, anchor, position))


def dropout_keys():
    keyed = dropout.words(77, 4096, torch.device("cpu")).numpy()
    return [digest(keyed), digest(seeding.words(1, "dropout", np.arange(9, dtype=np.uint64), np.ones(9, np.uint64), 8))]


@pytest.mark.parametrize("part", [order, spans, masks, dropout_keys], ids=lambda part: part.__name__)
def test_draws_are_those_of_earlier_versions(part):
    assert part() == FROZEN[part.__name__]


def own_tokenizer(texts, folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL.values()], show_progress=False)
    trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def shard_digests(folder, source, content, tokenizer):
    """SHA-256 of the shards of a corpus that is written unit by unit in this process, by name."""
    values = runs.prepare_values(source, folder, unit_mib=1)
    values |= {"duplicates": {"exact": False}, "tokenizer": {"kind": "pretrained", "name": str(tokenizer)}}
    if content:
        del values["geometry"]
        values["content"] = content
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.save_pretrained(folder / "tokenizer")
    config = PipelineConfig.model_validate(values)
    for unit in plan_units(config.corpus, config.unit_mib)[0]:
        write_unit(unit, folder, config, describe_tokenizer(loaded, "pretrained"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(folder.rglob("*.arrow"))}


@pytest.mark.parametrize(
    ("source", "content"), [("documents.jsonl", None), ("sentences.txt", "sentences"), ("pairs.jsonl", PAIRS)]
)
def test_shards_are_those_of_earlier_versions(source, content, tmp_path):
    runs.write_corpus(tmp_path / "documents.jsonl", documents=60)
    write_texts(tmp_path)
    own_tokenizer([(tmp_path / "documents.jsonl").read_text()], tmp_path / "tokenizer")
    digests = shard_digests(tmp_path / "out", tmp_path / source, content, tmp_path / "tokenizer")
    assert digests == FROZEN[f"shards {source.partition('.')[0]}"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("name", [name for name in FROZEN if name.startswith("corpus ")])
def test_shards_of_shared_corpora_are_those_of_earlier_versions(name, tmp_path):
    with gzip.open(SHARED / "corpus" / f"{name.removeprefix('corpus ')}.jsonl.gz", "rb") as stream:
        (tmp_path / "documents.jsonl").write_bytes(b"".join(itertools.islice(stream, 10)))
    tokenizer = SHARED / "tokenizers" / "roberta-base"
    assert shard_digests(tmp_path / "out", tmp_path / "documents.jsonl", None, tokenizer) == FROZEN[name]
