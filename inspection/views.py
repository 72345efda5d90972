"""`declutr inspect DATA --config CONFIG`: the spans and views that an epoch makes of rows of texts or clips."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from declutr.common.console.terminal import shorten
from declutr.pipeline.shards.shards import ShardSet
from declutr.trainer.data.batches import RankBatch
from declutr.trainer.data.chunks import fetched
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.data.patches import PatchBatch
from declutr.trainer.objectives.base import Objective, implementation_of
from declutr.trainer.setup.build import load_tokenizer
from declutr.trainer.setup.config import TrainConfig

_SHOWN_CHARACTERS = 160
_NO_TOKENS = Vocabulary(size=1, bos=None, eos=None, mask=0, special=())
_ANY_LENGTH = 2**30  # inspect loads no encoder, whose positions the checks before a run compare with the settings


def view_lines(folder: Path, config: TrainConfig, rows: Sequence[int], epoch: int) -> Iterator[str]:
    """Show rows of the training split, each with its spans, views and facts as the run's collator makes them.

    Args:
        folder: the shards.
        config: configuration of the run.
        rows: numbers of rows.
        epoch: epoch in which they are read.
    """
    shards = ShardSet(folder, "train")
    tokenizer, vocabulary = (None, _NO_TOKENS)
    if shards.manifest.tokenizer is not None:
        tokenizer, vocabulary = load_tokenizer(folder, shards.manifest)
    with torch.device("meta"):  # the collator needs no weights
        run = config.context(shards.manifest.short_documents)
        objective = implementation_of(config.objective)(config.objective, run, 1)
    collator = objective.collator(vocabulary, _ANY_LENGTH)
    for row in rows:
        table = shards.take(np.array([row], np.int64))
        source, offset = table["source"][0].as_py(), table["offset"][0].as_py()
        yield f"row {row}, {source} at {offset}, id {table['id'][0].as_py().hex()}"
        epochs = np.array([epoch], np.int64)
        batch = collator.collate(
            fetched(shards, np.array([row], np.int64), epochs, getattr(collator, "fetch", None)), epochs
        )
        if tokenizer is None:
            yield from _clip_lines(batch)
        else:
            pieces = batch.tokens.input_ids.split(batch.tokens.lengths.tolist())
            yield from _span_lines(batch, [tokenizer.decode(ids.tolist()) for ids in pieces])
        yield from _row_lines(batch, objective)


def _span_lines(batch: RankBatch, texts: list[str]) -> Iterator[str]:
    """One line a span: its length, dropout rates, tokens to predict and text."""
    ends = batch.spans.lengths.cumsum(0)
    for number, text in enumerate(texts):
        length, end = int(batch.spans.lengths[number]), int(ends[number])
        notes = [f"{length} tokens"]
        if batch.spans.rates is not None:
            hidden, attention = batch.spans.rates[number].tolist()
            notes.append(f"dropout {hidden:g}, of attention {attention:g}")
        if masked := int(((batch.spans.selected >= end - length) & (batch.spans.selected < end)).sum()):
            notes.append(f"{masked} to predict")
        yield f"  span {number} ({'; '.join(notes)}): {shorten(text, _SHOWN_CHARACTERS)}"


def _clip_lines(batch: RankBatch) -> Iterator[str]:
    """One line a clip: its patches, and the range of their values."""
    spans = batch.spans
    assert isinstance(spans, PatchBatch)
    for number, values in enumerate(spans.values.split(spans.lengths.tolist())):
        patches = values[1:]  # behind the CLS token
        lowest, highest = float(patches.min()), float(patches.max())
        size = patches.shape[1]
        yield f"  clip {number}: {len(patches):,} patches of {size:,} values from {lowest:g} to {highest:g}"


def _row_lines(batch: RankBatch, objective: Objective) -> Iterator[str]:  # type: ignore[type-arg]
    """One line for each row of views: the numbers of its spans, and its facts."""
    views = batch.views
    if views is None:
        views = torch.arange(batch.num_rows * objective.num_views).view(batch.num_rows, objective.num_views)
    for number, spans in enumerate(views.tolist()):
        facts = "".join(f", {name} {int(values[number])}" for name, values in batch.facts.items())
        yield f"  views {number}: spans {' and '.join(map(str, spans))}{facts}"
