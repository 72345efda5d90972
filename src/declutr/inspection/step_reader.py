"""The rows of a step as the collator of their task makes them.

A row's spans do not depend on the other rows of its batch, so each row is collated alone.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from declutr.common.errors import UsageError
from declutr.common.paths import expand
from declutr.inspection.order import TaskOrder
from declutr.trainer.checkpoints.exported import EXPORT
from declutr.trainer.data.batches import Collator, RankBatch
from declutr.trainer.data.chunks import fetched
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.language_model import load_hf_config, max_span_tokens
from declutr.trainer.objectives.base import Objective, implementation_of
from declutr.trainer.objectives.declutr.collator import SpanCollator
from declutr.trainer.objectives.supcon.collator import ClipCollator
from declutr.trainer.setup.build import load_tokenizer

_NO_TOKENS = Vocabulary(size=1, bos=None, eos=None, mask=0, special=())
_ANY_LENGTH = 2**30


@dataclass(frozen=True)
class ReadRow:
    """A row of the shards that a step reads.

    Attributes:
        position: its place in the batch.
        epoch: epoch in which it is read.
        number: its number in the training split.
        id: id of the document.
        source: file that it was read from.
        offset: place in that file.
        batch: its spans and views.
        roles: description of each span or clip, such as `anchor [3, 40)`; empty if the views describe them.
    """

    position: int
    epoch: int
    number: int
    id: str
    source: str
    offset: int
    batch: RankBatch
    roles: list[str]


class StepReader:
    """Reads the rows of any step of a task as its workers do.

    Args:
        task: order of the task.
        run: folder of the run, whose exported encoder has the positions of the run's.

    Raises:
        UsageError: the objective cannot be loaded.
        UsageError: the encoder's number of positions, which may cut long spans, is not to be found.
        ShardError: the tokenizer is not that of the shards.
    """

    def __init__(self, task: TaskOrder, run: Path) -> None:
        self.task = task
        shards, config = task.shards, task.config
        self.tokenizer, vocabulary = None, _NO_TOKENS
        if shards.manifest.tokenizer is not None:
            self.tokenizer, vocabulary = load_tokenizer(shards.folder, shards.manifest)
        room = _ANY_LENGTH
        if self.tokenizer is not None and config.objective.text_tokens is None:
            room = _positions(config.encoder, self.tokenizer, run) - vocabulary.num_specials
        with torch.device("meta"):  # the collator needs no weights
            context, kind = config.context(shards.manifest.short_documents), implementation_of(config.objective)
            try:
                self.objective: Objective[Any] = kind(config.objective, context, 1)
            except (Exception, SystemExit) as error:  # of any package
                raise UsageError(
                    f"objective {config.objective.kind}: {kind.__name__}(...) raised {type(error).__name__}: {error}"
                ) from error
        self.collator: Collator = self.objective.collator(vocabulary, room)

    def rows(self, step: int, only: Collection[int | None] | None = None) -> Iterator[ReadRow]:
        """The rows that a 1-based step reads, in their order.

        Args:
            step: the step.
            only: numbers of the rows to read; None: all.
        """
        epochs, numbers = self.task.plan.documents(step - 1, step)
        for position, (epoch, number) in enumerate(zip(epochs.tolist(), numbers.tolist(), strict=True)):
            if only is not None and number not in only:
                continue
            row, in_epoch = np.array([number], np.int64), np.array([epoch], np.int64)
            origin = self.task.shards.take(row)
            table = fetched(self.task.shards, row, in_epoch, getattr(self.collator, "fetch", None))
            batch = self.collator.collate(table, in_epoch)
            named = (origin[name][0].as_py() for name in ("id", "source", "offset"))
            identity, source, offset = named
            roles = self._roles(table, in_epoch)
            yield ReadRow(position, epoch, number, identity.hex(), source, offset, batch, roles)

    def _roles(self, table: pa.Table, epochs: np.ndarray) -> list[str]:
        """Places of the spans of a document, or the masks of a clip."""
        if isinstance(self.collator, ClipCollator):
            return self.collator.told(table, epochs, self.task.shards)
        if not isinstance(self.collator, SpanCollator):
            return []
        spans = self.collator.sample(table, epochs)
        anchors, positives = spans.anchors[spans.present].tolist(), spans.positives[spans.present].tolist()
        roles = [f"anchor [{start}, {end})" for start, end in anchors]
        roles += [f"{role}, unmasked" for role in roles] * self.collator.unmasked_anchors
        if self.collator.include_positives:
            for anchor, its in zip(anchors, positives, strict=True):
                roles += [f"positive [{one[0]}, {one[1]}) {relation(anchor, one)}" for one in its]
        return roles


def relation(anchor: list[int], positive: list[int]) -> str:
    """Position of a positive relative to its anchor, in the paper's terms."""
    if positive[1] == anchor[0] or positive[0] == anchor[1]:
        return "adjacent"
    if positive[1] < anchor[0] or positive[0] > anchor[1]:
        return "distant"
    if anchor[0] <= positive[0] and positive[1] <= anchor[1]:
        return "subsumed"
    if positive[0] <= anchor[0] and anchor[1] <= positive[1]:
        return "subsuming"
    return "overlapping"


def _positions(encoder: EncoderConfig, tokenizer: Any, run: Path) -> int:
    """Positions of the encoder, specials included, from local files alone and without code that a file names.

    Raises:
        UsageError: no local file has them.
    """
    from transformers import AutoConfig, AutoModelForMaskedLM

    local = run / EXPORT if (run / EXPORT / "config.json").is_file() else None
    if local is None and encoder.pretrained is not None and expand(encoder.pretrained).is_dir():
        local = expand(encoder.pretrained)
    try:
        if local is None and encoder.pretrained is not None:  # from the hub: only what was downloaded before
            hf = AutoConfig.from_pretrained(encoder.pretrained, local_files_only=True, trust_remote_code=False)
        else:
            update = {"pretrained": None if local is None else str(local), "trust_remote_code": False}
            hf = load_hf_config(
                encoder.model_copy(update=update), len(tokenizer), {"pad_token_id": tokenizer.pad_token_id}
            )
        with torch.device("meta"):
            return max_span_tokens(AutoModelForMaskedLM.from_config(hf, trust_remote_code=False))
    except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"encoder.pretrained = {encoder.pretrained}: its number of positions, which cuts longer spans, cannot be "
            f"read from this machine ({reason}); add encoder.pretrained=FOLDER"
        ) from error
