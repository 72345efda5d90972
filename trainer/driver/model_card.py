"""The model card of an encoder: base model, method, use, scores, limits, data, settings; without paths of the machine.

Whoever publishes the encoder fills the field `license` of its head.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from declutr.common.hub import looks_like_a_path
from declutr.pipeline.shards.content import MEDIA_KINDS
from declutr.pipeline.shards.manifest import data_hash
from declutr.trainer.checkpoints.state import A_PATH, RunState
from declutr.trainer.metrics.config import SICKR, STSB
from declutr.trainer.objectives.config import REPORTED
from declutr.trainer.run import RunPlan

CARD = "README.md"
PLACE = "path/to/this/folder"  # Stands for the place of the encoder in the examples of its card
_ROWS = {"pairs": "premises"}  # names of the rows of shards, where the kind of content is not their name
_SENTENCE_TRANSFORMERS = f"""    from sentence_transformers import SentenceTransformer
    embeddings = SentenceTransformer("{PLACE}").encode(["A sentence."])

transformers may list weights of a head for masked words as UNEXPECTED: only further training needs it.
"""
_NO_SENTENCE_TRANSFORMERS = "sentence-transformers has no mean without the first token; `declutr embed` computes it.\n"
_POOLED = {
    "mean": "hidden, mask = hidden, texts['attention_mask'][:, :, None]\n"
    "    embeddings = (hidden * mask).sum(1) / mask.sum(1)",
    "mean_without_cls": "hidden, mask = hidden[:, 1:], texts['attention_mask'][:, 1:, None]\n"
    "    embeddings = (hidden * mask).sum(1) / mask.sum(1)",
    "cls": "embeddings = hidden[:, 0]",
    "max": "mask = texts['attention_mask'][:, :, None] == 0\n"
    "    embeddings = hidden.masked_fill(mask, float('-inf')).amax(1)",
}  # from hidden states `hidden` to embeddings, by pooling
_SIZES = """Sizes: {}. The first numbers of an embedding, this many, are embeddings too, compared by cosine or after
normalisation: `SentenceTransformer(folder, truncate_dim=SIZE)`, `declutr embed --dimensions SIZE --normalise`.
"""
_LIMITS = """The scores are of documents like those of the training; measure it on your own texts before you rely on it
(`declutr evaluate --pairs`). Longer inputs than the limit are cut. Nobody examined it for social bias, and a text's
nearest neighbour need not be true or relevant."""


def _transformers(pooling: str) -> str:
    return f"""    import torch
    from transformers import AutoModel, AutoTokenizer
    texts = AutoTokenizer.from_pretrained("{PLACE}")(["A sentence."], padding=True, return_tensors="pt")
    hidden = AutoModel.from_pretrained("{PLACE}")(**texts).last_hidden_state
    {_POOLED[pooling]}
"""


@dataclass(frozen=True)
class Card:
    """Content of a card; texts are Markdown."""

    title: str  # of the encoder
    base: str | None  # name or folder of the encoder from which it was made; None if it was trained from scratch
    method: str  # of the training or the closed form
    scores: str  # with intervals
    data: str  # from which it was made, without texts
    settings: Mapping[str, Any]  # that made it; paths are left out
    pooling: str  # of the encoder
    layers: bool  # true if it has layers behind its pooling
    tags: tuple[str, ...] = field(default=())  # for a search on the hub
    prompt: str = ""  # text before every text of the training
    query_prompt: str | None = None  # text before queries; None: `prompt`

    def text(self) -> str:
        """The file."""
        start, head = "From scratch.", ""
        if self.base is not None and _is_path(self.base):  # the hub takes only its own names as base_model
            start = f"Start: `{Path(self.base).name}`, a folder."
            head = "# base_model: OWNER/NAME, if the folder has a copy of a model of the hub\n"
        elif self.base is not None:
            start, head = f"Start: {self.base}.", f"base_model: {self.base}\n"
        prompt = f"Every text of the training began with the prompt `{self.prompt}`.\n" if self.prompt else ""
        if self.query_prompt not in (None, self.prompt):
            prompt = f"Queries of the training began with `{self.query_prompt}`, other texts with `{self.prompt}`.\n"
        alone = self.pooling == "mean_without_cls"
        by_hand = (
            "It has layers behind the pooling, so transformers alone does not give its embeddings.\n"
            if self.layers
            else f"With transformers:\n\n{_transformers(self.pooling)}"
        )
        return f"""---
license:
{head}library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [{", ".join(["sentence-transformers", "feature-extraction", *self.tags])}]
---
# {self.title}

{start} {self.method}{prompt}
## Use
{_NO_SENTENCE_TRANSFORMERS if alone else _SENTENCE_TRANSFORMERS}
{by_hand}
## Scores
{self.scores}

## Limits
{_LIMITS}

## Data
{self.data}

## Licence
It is the field `license` at the head of this file. While that is empty, none is given: whoever publishes this encoder
names one that the start, the data and the code allow.

## Settings
```json
{json.dumps(without_paths(self.settings), indent=1)}
```
"""


def without_paths(value: Any) -> Any:
    """Settings in which paths of this machine, and addresses, are replaced."""
    if isinstance(value, Mapping):
        return {key: A_PATH if key == "address" and item else without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return A_PATH if isinstance(value, str) and _is_path(value) else value


def called(encoder: str) -> str:
    """The name of an encoder in a title."""
    return "An encoder" if _is_path(encoder) else encoder.rpartition("/")[2]


def _is_path(value: str) -> bool:
    """Returns True for a path or an address; names of the hub that are no folder here are none."""
    return ("/" in value and looks_like_a_path(value)) or ("/" in value and Path(value).exists()) or "~" in value[:1]


def model_card(plan: RunPlan, state: RunState, verdict: str, layers: bool) -> str:
    """The card of a run's export; `verdict` is a sentence that compares it with the start of the run."""
    config, manifest = plan.config, plan.manifest
    objective, kind, tokenizer = config.objective, manifest.content.kind, manifest.text_tokenizer
    rows = _ROWS.get(kind, kind)
    scores = "\n".join(f"| {name} | {value:.4f} |" for name, value in state.scores.items()) or "| not validated | |"
    scratch = f"Shape: {without_paths(config.encoder.from_config)}. " if config.encoder.from_config else ""
    dropped = "".join(f"Trained but not part of this encoder: {part}.\n" for part in objective.dropped)
    sizes = _SIZES.format("/".join(map(str, objective.matryoshka.sizes))) if objective.matryoshka else ""
    last = [place.rstrip("/").rpartition("/")[2] for place in config.places]  # a card has no paths
    names = [f"corpus {number} ({name})" for number, name in enumerate(last, 1)]
    corpora = "".join(f"\n- {line}" for line in plan.corpus_lines(state.step, names)) if len(names) > 1 else ""
    part = "" if config.data_fraction == 1 else f"{plan.training_shards[''].num_documents} of "
    judged = {STSB: "STS-B", SICKR: "SICK-R"}
    sts = "".join(
        f" {score}: Spearman correlation on {source}'s development set, in percent."
        for score, source in judged.items()
        if score in state.scores
    )
    return Card(
        title=f"Sentence encoder trained with {objective.method}",
        base=config.encoder.pretrained,
        method=f"""{scratch}Pooling: {config.encoder.pooling}. Dimensions and longest input: see `config.json`.
Trained for {state.step} steps of {config.batch_documents} {rows} ({state.documents} {rows} read), {objective.learns}.
{dropped}{"".join(_task_lines(plan))}{sizes}""",
        scores=f"""{objective.scored}{sts} One half of the held-out rows chooses; `{REPORTED}` marks the other half.

Result on that other half: {verdict}.

| score | value |
| --- | --- |
{scores}""",
        data=f"""{part}{manifest.totals["kept_train"]} training {rows}, {manifest.totals["num_tokens"]} tokens; data
hash `{state.data_hash}`, preparation config hash `{manifest.config_hash}`, tokenizer `{tokenizer.fingerprint}`,
settings hash `{state.config_hash}`.{corpora}""",
        settings=config.model_dump(mode="json"),
        pooling=config.encoder.pooling,
        prompt=config.encoder.prompt or "",
        query_prompt=config.encoder.query_prompt,
        layers=layers,
        tags=(objective.kind,),
    ).text()


def _task_lines(plan: RunPlan) -> Iterator[str]:
    """A sentence for each auxiliary task: its method, data and parts that are not exported."""
    config = plan.config
    update = "in the same update" if config.task_schedule == "joint" else "in updates of its own before each step"
    for name, task in config.auxiliary_tasks.items():
        manifest = plan.manifests[name]
        kind, objective = manifest.content.kind, task.objective
        parts = [*objective.dropped, *(["the embeddings of its patches"] if kind in MEDIA_KINDS else [])]
        yield (
            f"Also trained with {objective.method} on {kind} (task {name}, {update}): {task.batch_documents} a step "
            f"of {manifest.totals['kept_train']}, {objective.learns}, weight {task.weight:g}, data hash "
            f"`{data_hash(manifest)}`.\n"
        )
        yield from (f"Trained but not part of this encoder: {part}.\n" for part in parts)
