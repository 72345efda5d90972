"""A trained encoder as a folder that transformers and sentence-transformers load."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec

from common.console.logs import get_logger
from common.records import DamagedError, convert_record, read_record
from common.storage import folder_aside, hash_file, hash_json, set_aside, write_json, write_text
from pipeline.shards.manifest import load_manifest
from trainer.checkpoints import checkpoint, ranking
from trainer.checkpoints.checkpoint import CHECKPOINTS
from trainer.checkpoints.state import RunState
from trainer.metrics.settings import FOLLOWED
from trainer.model.encoder import Encoder
from trainer.model.language_model import max_span_tokens
from trainer.model.silence import silence
from trainer.setup.build import build_encoder, load_tokenizer
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig

EXPORT = "export"
SETTINGS = "declutr.json"


def export(config: TrainConfig, run: Path) -> Path:
    """Writes `run/export` from the run's last or best checkpoint: weights, tokenizer, pooling, model card.

    The best is that of the scores that are there now; where a follower has scored none, the last one. A folder that is
    there is left as it is when it was made from this very checkpoint and all of its files verify.

    Raises:
        CheckpointError: no checkpoint of the run verifies.
    """
    target = run / EXPORT
    folder = run / CHECKPOINTS
    found = _chosen(config, folder)
    if found is None:
        raise checkpoint.CheckpointError(f"{folder}: holds no whole checkpoint to export")
    path, state = found
    if target.exists() and _is_of(target, state):
        return target
    for left in run.glob(f".{EXPORT}.*.tmp"):  # of an export that was killed
        shutil.rmtree(left)
    tokenizer, _ = load_tokenizer(data_folder(config.data, config.cache))
    encoder = build_encoder(config, tokenizer)
    checkpoint.load_encoder(path, encoder)
    with folder_aside(target, replace=True) as aside:
        # a head that neither the pretrained encoder had nor this run trained would pass for one that was
        write_encoder(encoder, tokenizer, aside, () if config.objective.mlm else encoder.unloaded.head)
        write_text(aside / "README.md", model_card(config, state))
        settings = {
            "step": state.step,
            "pooling": config.encoder.pooling,
            "config": config.model_dump(mode="json"),
            "checkpoint": _identity(state),
            "files": {name: hash_file(aside / name) for name in sorted(_files(aside))},
        }
        write_json(aside / SETTINGS, settings | {"hash": hash_json(settings)})
        if others := sorted(_files(target) - _files(aside)):
            _keep(target, f"it holds {', '.join(others)} besides")
    return target


class ExportSettings(msgspec.Struct, frozen=True):
    """The part of an export's settings that is read back."""

    step: int
    """Of the checkpoint it was made from."""
    pooling: str
    checkpoint: str = ""
    """Hash of that checkpoint's state, which holds the checksums of its files; empty in exports of older versions."""
    files: dict[str, str] = {}
    """SHA-256 of every other file of the folder."""


def read_settings(folder: Path) -> ExportSettings:
    """The settings of an exported encoder.

    Raises:
        DamagedError: they are not what `export` writes.
        OSError: they are missing or cannot be read.
    """
    raw = read_record(folder / SETTINGS, dict[str, Any])
    if raw.pop("hash", hash_json(raw)) != hash_json(raw):
        raise DamagedError(f"{folder / SETTINGS} is altered (its hash differs)")
    return convert_record(raw, ExportSettings, str(folder / SETTINGS))


def _is_of(target: Path, state: RunState) -> bool:
    """Whether the folder is the whole export of this checkpoint; one that was altered is kept under another name."""
    try:
        settings = read_settings(target)
    except FileNotFoundError:
        _keep(target, f"{SETTINGS} is missing")
        return False
    except DamagedError as error:
        _keep(target, str(error))
        return False
    found = _files(target)
    altered = [name for name, digest in settings.files.items() if name in found and hash_file(target / name) != digest]
    missing = sorted(set(settings.files) - found)
    if altered or missing:
        told = [f"{name} is altered or truncated" for name in altered] + [f"{name} is missing" for name in missing]
        _keep(target, ", ".join(told))
        return False
    if settings.checkpoint != _identity(state):
        source = "another checkpoint" if settings.checkpoint else "a checkpoint that it does not name"
        get_logger().info("%s was made from %s: exporting again", target, source)
        return False
    return True


def _keep(target: Path, why: str) -> None:
    """Makes room for a new export; somebody may have put work of their own into the old one."""
    kept = set_aside(target)
    get_logger().warning("%s: %s; exporting again, what was there is kept as %s", target, why, kept)


def _identity(state: RunState) -> str:
    """Hash of a checkpoint: the checksums of its files, its step, and the configuration and data it comes from."""
    return hash_json([state.step, state.config_hash, state.data_hash, state.files])


def _files(folder: Path) -> set[str]:
    """Names of the files of an export, but for the settings."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in paths} - {SETTINGS}


def _chosen(config: TrainConfig, folder: Path) -> tuple[Path, RunState] | None:
    """The checkpoint to export; where scores are missing, it is said."""
    score = config.validation.score
    if config.export == "last":
        return checkpoint.find_latest(folder)
    found = ranking.find_best(folder, score)
    if score != FOLLOWED:
        return found
    if waiting := ranking.unscored(folder, score):
        get_logger().warning(
            "%s is exported, and the checkpoints of steps %s have no score: give them one (declutr evaluate --follow), "
            "and the same command exports the best of all",
            "the last checkpoint" if found is None else f"the best by what is known, step {found[1].step},",
            ", ".join(map(str, waiting)),
        )
    return found or checkpoint.find_latest(folder)


def write_encoder(encoder: Encoder, tokenizer: Any, folder: Path, untrained: tuple[str, ...] = ()) -> None:
    """Weights, tokenizer and pooling into a folder that is there: all that is needed to load them again.

    Args:
        encoder: the encoder.
        tokenizer: its tokenizer.
        folder: an empty folder.
        untrained: weights that are left out, because they are still as random as they were drawn.
    """
    weights = {name: weight for name, weight in encoder.model.state_dict().items() if name not in untrained}
    with silence():
        encoder.model.save_pretrained(folder, state_dict=weights if untrained else None)
    limit = max_span_tokens(encoder.model)
    tokenizer.model_max_length = limit
    tokenizer.save_pretrained(folder)
    for name, value in sentence_transformers_files(encoder.hidden_size, limit, encoder.config.pooling).items():
        write_json(folder / name, value)


def sentence_transformers_files(size: int, max_tokens: int, pooling: str) -> dict[str, Any]:
    """The small JSON files by which sentence-transformers recognises an encoder with its pooling."""
    return {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        "1_Pooling/config.json": {
            "word_embedding_dimension": size,
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": pooling == "max",
        },
    }


def model_card(config: TrainConfig, state: RunState) -> str:
    """What the encoder is, where it comes from, how it scored."""
    manifest = load_manifest(data_folder(config.data, config.cache))
    scores = "\n".join(f"| {name} | {value:.4f} |" for name, value in state.scores.items()) or "| not validated | |"
    source = config.encoder.pretrained or f"from scratch ({config.encoder.scratch})"
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, {config.objective.kind}]
---
# Sentence encoder trained with {config.objective.method}

Start: {source}. Pooling: {config.encoder.pooling}. Dimensions and longest input: see `config.json`.
Trained for {state.step} steps of {config.batch_documents} documents ({state.documents} documents read), without labels.

    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("path/to/this/folder").encode(["A sentence."])

## Held-out scores of these weights
Same-document span retrieval, alignment, uniformity (log form) and effective rank on held-out documents of the corpus.

| score | value |
| --- | --- |
{scores}

## Data
{manifest.totals["kept_train"]} training documents, {manifest.totals["num_tokens"]} tokens; data hash
`{state.data_hash}`, preparation config hash `{manifest.config_hash}`, tokenizer `{manifest.tokenizer.fingerprint}`.

## Configuration (hash `{state.config_hash}`)
```json
{json.dumps(config.model_dump(mode="json"), indent=1)}
```
"""
