"""Inputs of `benchmarks.quality.siblings`: pairs without common premises, and the lower layers of an encoder."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from declutr.common.storage import write_text
from declutr.trainer.model.load_report import silence

_HELD_OUT_PREMISES = 500


def split_nli(source: Path, folder: Path) -> None:
    """Write `train.jsonl` and `dev.jsonl` of pairs; a premise of one is not in the other.

    `dev` has the pairs of 500 premises of SNLI's development set, chosen by their hash. The other pairs of that set and
    those of cad_nli_train are for training.
    """
    pairs: dict[str, list[dict[str, str]]] = {}
    for name in ("snli_dev", "cad_nli_train"):
        lines = (source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        pairs[name] = [json.loads(line) for line in lines]
    premises = {_key(pair) for pair in pairs["snli_dev"]}
    held_out = set(sorted(premises, key=lambda key: hashlib.blake2b(key.encode()).digest())[:_HELD_OUT_PREMISES])
    parts: dict[str, list[dict[str, str]]] = {"train": [], "dev": []}
    for name, found in pairs.items():
        for pair in found:
            if _key(pair) not in held_out:
                parts["train"].append(pair)
            elif name == "snli_dev":
                parts["dev"].append(pair)
    for name, part in parts.items():
        text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in part)
        path = folder / f"{name}.jsonl"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # an equal file keeps its time
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, text)


def _key(pair: Mapping[str, str]) -> str:
    """The premise without spaces and case, because the files tokenize words differently."""
    return "".join(pair["premise"].lower().split())


def keep_lower_layers(source: Path, layers: int, target: Path) -> None:
    """Write an encoder of BERT's or RoBERTa's family with the lower layers of another one, and its tokenizer.

    Raises:
        SystemExit: it has fewer layers.
    """
    from transformers import AutoModel, AutoTokenizer

    with silence():
        model = AutoModel.from_pretrained(source, dtype=torch.float32)
        if not 1 <= layers <= len(model.encoder.layer):
            raise SystemExit(f"--start-layers {layers}: {source} has {len(model.encoder.layer)} layers")
        model.encoder.layer = model.encoder.layer[:layers]
        model.config.num_hidden_layers = layers
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(source).save_pretrained(target)
