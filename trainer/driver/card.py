"""The model card of an exported encoder."""

import json

from pipeline.shards.manifest import load_manifest
from trainer.checkpoints.state import RunState
from trainer.metrics.settings import STSB
from trainer.setup.cache import data_folder
from trainer.setup.config import TrainConfig

_ROWS = {"pairs": "premises"}
"""Names of the rows of shards, where the kind of content is not their name."""


def model_card(config: TrainConfig, state: RunState) -> str:
    """Text of the model card: origin, data, configuration and scores of the encoder."""
    manifest = load_manifest(data_folder(config.data, config.cache))
    objective, kind, tokenizer = config.objective, manifest.content.kind, manifest.text_tokenizer
    rows = _ROWS.get(kind, kind)
    scores = "\n".join(f"| {name} | {value:.4f} |" for name, value in state.scores.items()) or "| not validated | |"
    source = config.encoder.pretrained or f"from scratch ({config.encoder.scratch})"
    dropped = "".join(f"Trained but not part of this encoder: {part}.\n" for part in objective.dropped)
    sts = "" if STSB not in state.scores else f" {STSB}: Spearman correlation on STS-B's development set, in percent."
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, {objective.kind}]
---
# Sentence encoder trained with {objective.method}

Start: {source}. Pooling: {config.encoder.pooling}. Dimensions and longest input: see `config.json`.
Trained for {state.step} steps of {config.batch_documents} {rows} ({state.documents} {rows} read), {objective.learns}.
{dropped}
    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("path/to/this/folder").encode(["A sentence."])

## Held-out scores of these weights
{objective.scored}{sts}

| score | value |
| --- | --- |
{scores}

## Data
{manifest.totals["kept_train"]} training {rows}, {manifest.totals["num_tokens"]} tokens; data hash
`{state.data_hash}`, preparation config hash `{manifest.config_hash}`, tokenizer `{tokenizer.fingerprint}`.

## Configuration (hash `{state.config_hash}`)
```json
{json.dumps(config.model_dump(mode="json"), indent=1)}
```
"""
