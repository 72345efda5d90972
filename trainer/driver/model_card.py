"""The model card of an exported encoder."""

import json
from collections.abc import Iterator

from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.pipeline.shards.manifest import data_hash
from declutr.trainer.checkpoints.state import RunState
from declutr.trainer.driver.resolved import ResolvedRun
from declutr.trainer.metrics.config import SICKR, STSB
from declutr.trainer.objectives.row_score import REPORTED

_ROWS = {"pairs": "premises"}
"""Names of the rows of shards, where the kind of content is not their name."""
_SENTENCE_TRANSFORMERS = """    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("path/to/this/folder").encode(["A sentence."])

transformers may list weights of a head for masked words as UNEXPECTED: only further training needs it.
"""
_USE = {
    "mean_without_cls": """sentence-transformers has no mean without the first token. `declutr embed` computes it, as do
these lines:

    import torch
    from transformers import AutoModel, AutoTokenizer
    texts = AutoTokenizer.from_pretrained("path/to/this/folder")(["A sentence."], padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained("path/to/this/folder")(**texts).last_hidden_state[:, 1:]
    mask = texts["attention_mask"][:, 1:, None]
    embeddings = (hidden * mask).sum(1) / mask.sum(1)
"""
}
"""How to load an encoder, by pooling."""


def model_card(run: ResolvedRun, state: RunState, verdict: str) -> str:
    """Text of the model card: origin, data, configuration and scores of the encoder.

    `verdict` is a sentence that compares it with the start of the run.
    """
    config, manifest = run.config, run.manifest
    objective, kind, tokenizer = config.objective, manifest.content.kind, manifest.text_tokenizer
    rows = _ROWS.get(kind, kind)
    scores = "\n".join(f"| {name} | {value:.4f} |" for name, value in state.scores.items()) or "| not validated | |"
    source = config.encoder.pretrained or f"from scratch ({config.encoder.from_config})"
    dropped = "".join(f"Trained but not part of this encoder: {part}.\n" for part in objective.dropped)
    auxiliary = "".join(_task_lines(run))
    corpora = "".join(f"- {line}\n" for line in run.corpus_lines(state.step)) if run.plan.sizes else ""
    judged = {STSB: "STS-B", SICKR: "SICK-R"}
    sts = "".join(
        f" {score}: Spearman correlation on {source}'s development set, in percent."
        for score, source in judged.items()
        if score in state.scores
    )
    return f"""---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, {objective.kind}]
---
# Sentence encoder trained with {objective.method}

Start: {source}. Pooling: {config.encoder.pooling}. Dimensions and longest input: see `config.json`.
Trained for {state.step} steps of {config.batch_documents} {rows} ({state.documents} {rows} read), {objective.learns}.
{dropped}{auxiliary}
{_USE.get(config.encoder.pooling, _SENTENCE_TRANSFORMERS)}
## Held-out scores of these weights
{objective.scored}{sts} One half of the held-out rows chooses; `{REPORTED}` marks the other half.

Result on that other half: {verdict}.

| score | value |
| --- | --- |
{scores}

## Data
{manifest.totals["kept_train"]} training {rows}, {manifest.totals["num_tokens"]} tokens; data hash
`{state.data_hash}`, preparation config hash `{manifest.config_hash}`, tokenizer `{tokenizer.fingerprint}`.
{corpora}
## Licence
None is given yet. Whoever publishes this encoder names one that the start, the data and the code allow.

## Configuration (hash `{state.config_hash}`)
```json
{json.dumps(config.model_dump(mode="json"), indent=1)}
```
"""


def _task_lines(run: ResolvedRun) -> Iterator[str]:
    """A sentence for each auxiliary task: its method, data and parts that are not exported."""
    config = run.config
    update = "in the same update" if config.task_schedule == "joint" else "in updates of its own before each step"
    for name, task in config.auxiliary_tasks.items():
        manifest = run.manifests[name]
        kind, objective = manifest.content.kind, task.objective
        parts = [*objective.dropped, *(["the embeddings of its patches"] if kind in MEDIA_KINDS else [])]
        yield (
            f"Also trained with {objective.method} on {kind} (task {name}, {update}): {task.batch_documents} a step "
            f"of {manifest.totals['kept_train']}, {objective.learns}, weight {task.weight:g}, data hash "
            f"`{data_hash(manifest)}`.\n"
        )
        yield from (f"Trained but not part of this encoder: {part}.\n" for part in parts)
