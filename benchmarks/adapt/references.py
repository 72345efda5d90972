"""Other trainings of the same encoder on the same documents, with which the recipe is compared."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from declutr.adaptation.config import PASSAGE_TOKENS, AdaptConfig, located, prepare_config, train_config
from declutr.adaptation.documents import held_out_documents
from declutr.adaptation.job import load_transformer
from declutr.adaptation.measures import make_passages
from declutr.adaptation.scores import TestSet, compare_stsb, compared
from declutr.adaptation.whitening import passages
from declutr.common.bootstrap import Comparison
from declutr.encoders.transformer import TransformerEncoder
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.prepare import prepare
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.model.language_model import vocabulary_of
from declutr.trainer.setup.config import TrainConfig
from declutr.trainer.train import train

REFERENCES: dict[str, dict[str, Any]] = {
    "two anchors, adjacent positives": {"spans.num_anchors": 2, "spans.strategy": "adjacent"},
    "one anchor, adjacent positive": {"spans.strategy": "adjacent"},
    "last third of the layers": {"encoder.num_trainable_layers": 2},
    "MLM": {"objective.terms": "mlm", "encoder.new_mlm_head": True},
    "SimCSE": {"objective": {"kind": "simcse", "max_tokens": PASSAGE_TOKENS}, "encoder.dropout": 0.1},
}
"""Settings that differ from the recipe's training, by name; the number of steps is the same."""
_MOST_PASSAGES = 16


def references(
    config: AdaptConfig, output: Path, steps: int
) -> Iterator[tuple[str, dict[str, Comparison], Comparison | None]]:
    """Trains each reference; yields its name, its differences on test documents, and that on STS-B's test set.

    Args:
        config: of a finished adaptation.
        output: its folder.
        steps: of its training.
    """
    config, data = located(config), output / "data"
    start = load_transformer(config.encoder)
    documents = held_out_documents(prepare_config(config, data), data, config.seed)["test"]
    test = TestSet(make_passages(documents, start.tokenizer))
    before = test.encoder(start)
    for name, changes in REFERENCES.items():
        run = output / "references" / name.replace(",", "").replace(" ", "-")
        shards = _sentences(config, data, start) if name == "SimCSE" else data
        settings = train_config(config, shards, run, steps, start.encoder.config.pooling)
        train(TrainConfig.model_validate(_changed(settings.model_dump(exclude_unset=True), changes)))
        after = load_transformer(str(run / "export"))
        stsb = compare_stsb(start, after, Path(config.stsb), config.seed) if config.stsb else None
        yield name, compared(before, test.encoder(after), config.seed), stsb


def _changed(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with these keys changed; SimCSE has no spans, and no score of distant ones."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = settings
        for section in sections:
            place = place[section]
        place[last] = value
    if "objective" in changes:
        del settings["spans"], settings["validation"]["score"]
    elif settings["spans"]["strategy"] != "distant":
        del settings["spans"]["min_distance_tokens"]
    return settings


def _sentences(config: AdaptConfig, data: Path, start: TransformerEncoder) -> Path:
    """Shards of sentences: passages of the training documents."""
    shards = ShardSet(data, "train")
    rows = shards.take(np.arange(shards.num_documents))
    ids, _ = passages(rows, _MOST_PASSAGES, PASSAGE_TOKENS, vocabulary_of(start.tokenizer))
    texts = start.tokenizer.batch_decode(ids, skip_special_tokens=True)
    file = data.parent / "references" / "passages.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(" ".join(text.split()) + "\n" for text in texts), encoding="utf-8")
    made = {
        "output": str(file.parent / "passages"),
        "content": "sentences",
        "corpus": {"kind": "files", "paths": [str(file)]},
        "tokenizer": {"kind": "pretrained", "name": config.encoder},
        "validation_fraction": 0.0,
        "seed": config.seed,
    }
    prepare(PipelineConfig.model_validate(made))
    return file.parent / "passages"


def points(one: Comparison) -> dict[str, Any]:
    """A difference in points, with the ends of its interval and the number of rows."""
    low, high = (None, None) if one.interval is None else (100 * end for end in one.interval)
    return {"value": 100 * one.difference, "low": low, "high": high, "rows": one.rows}
