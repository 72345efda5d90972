"""`declutr why RUN --step N`: the rows of a step with their spans, masks, views and facts, as lines of text.

The rows of a step as the collator of their task makes them.

A row's spans do not depend on the other rows of its batch, so each row is collated alone.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from declutr.common.console.terminal import shorten
from declutr.common.errors import UsageError
from declutr.common.hub import cache_only
from declutr.inspection.order import RunOrder, TaskOrder, entries, replacement
from declutr.trainer.build import load_tokenizer
from declutr.trainer.checkpoints.state import EXPORT
from declutr.trainer.data.batches import Collator, PatchBatch, RankBatch, SpanBatch
from declutr.trainer.data.chunks import fetched
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.packing import Vocabulary
from declutr.trainer.model.config import EncoderConfig
from declutr.trainer.model.language_model import load_shapes, max_span_tokens
from declutr.trainer.objectives.base import Objective, implementation_of
from declutr.trainer.objectives.declutr.spans import SpanCollator
from declutr.trainer.objectives.supcon.collator import ClipCollator

_NO_TOKENS = Vocabulary(size=1, bos=None, eos=None, mask=0, special=())  # of images and clips
_ANY_LENGTH = 2**30  # of clips, and where the objective sets the limit


@dataclass(frozen=True)
class ReadRow:
    """A row of the shards that a step reads."""

    position: int  # its place in the batch
    epoch: int  # epoch in which it is read
    number: int  # its number in the training split
    id: str  # id of the document
    source: str  # file that it was read from
    offset: int  # place in that file
    batch: RankBatch  # its spans and views
    roles: list[str]  # description of each span or clip, such as `anchor [3, 40)`; empty if the views describe them


class StepReader:
    """Reads the rows of any step of a task as its workers do."""

    def __init__(
        self,
        task: TaskOrder,  # order of the task
        run: Path,  # folder of the run, whose exported encoder has the positions of the run's
    ) -> None:
        self.task = task
        shards, settings = task.shards, task.settings
        self.tokenizer, vocabulary = None, _NO_TOKENS
        if shards.manifest.tokenizer is not None:
            self.tokenizer, vocabulary = load_tokenizer(shards.folder, shards.manifest, task.encoder)
        room = _ANY_LENGTH
        if self.tokenizer is not None and settings.objective.text_tokens is None:
            room = _positions(task.encoder, self.tokenizer, run) - vocabulary.num_specials
        with torch.device("meta"):  # the collator needs no weights
            context, kind = settings.context(shards.manifest.short_documents), implementation_of(settings.objective)
            try:
                self.objective: Objective[Any] = kind(settings.objective, context, 1)
            except (Exception, SystemExit) as error:  # of any package
                raise UsageError(
                    f"objective {settings.objective.kind}: {kind.__name__}(...) raised {type(error).__name__}: {error}"
                ) from error
        self.collator: Collator = self.objective.collator(vocabulary, room)

    def rows(self, step: int, only: Collection[int | None] | None = None) -> Iterator[ReadRow]:
        """The rows that a 1-based step reads, in their order; with `only`, those with these numbers."""
        epochs, numbers = self.task.plan.documents(step - 1, step)
        for position, (epoch, number) in enumerate(zip(epochs.tolist(), numbers.tolist(), strict=True)):
            if only is not None and number not in only:
                continue
            row, in_epoch = np.array([number], np.int64), np.array([epoch], np.int64)
            origin = self.task.shards.take(row)  # workers get no source
            table = fetched(self.task.shards, row, in_epoch, getattr(self.collator, "fetch", None))  # or mixed
            batch = self.collator.collate(table, in_epoch)
            identity, source, offset = (origin[name][0].as_py() for name in ("id", "source", "offset"))
            yield ReadRow(position, epoch, number, identity.hex(), source, offset, batch, self._roles(table, in_epoch))

    def _roles(self, table: pa.Table, epochs: np.ndarray) -> list[str]:
        """Places of the spans of a document, or the masks of a clip."""
        if isinstance(self.collator, ClipCollator):
            return self.collator.describe(table, epochs, self.task.shards)
        if not isinstance(self.collator, SpanCollator):
            return []
        spans = self.collator.sample(table, epochs)
        anchors, positives = spans.anchors[spans.present].tolist(), spans.positives[spans.present].tolist()
        roles = [f"anchor [{start}, {end})" for start, end in anchors]
        roles += [f"{role}, unmasked" for role in roles] * self.collator.config.unmasked_anchors
        if self.collator.config.embeds:
            roles += [f"positive [{start}, {end})" for of_anchor in positives for start, end in of_anchor]
        return roles


def _positions(encoder: EncoderConfig, tokenizer: Any, run: Path) -> int:
    """Positions of the encoder, specials included, from local files alone and without code that a file names."""
    # the export has the positions of the run; it may be broken, and then a folder that the user names is read
    places = [str(run / EXPORT)] * (run / EXPORT / "config.json").is_file() + [encoder.pretrained]
    reasons = []
    for place in places:
        # the run may come from someone else, and grants no trust
        settings = encoder.model_copy(update={"pretrained": place, "trust_remote_code": False})
        try:
            with cache_only("only what was downloaded before is read"):
                return max_span_tokens(load_shapes(settings, tokenizer))
        # what transformers raises for files that it did not write
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            reasons.append((str(error).strip().splitlines() or [type(error).__name__])[0])
    raise UsageError(
        f"encoder.pretrained = {encoder.pretrained}: its number of positions, which cuts longer spans, cannot be "
        f"read from this machine ({'; '.join(reasons)}); add encoder.pretrained=FOLDER"
    )


def step_lines(
    order: RunOrder,  # order of the run
    step: int,  # 1-based
    document: str | None = None,  # show only the documents of this name, and compare no digest
    limit: int | None = None,  # characters of a text to show; None: all
) -> Iterator[tuple[str, bool]]:
    """Show each task's rows in a step; with each line, whether the digests so far are those of the run's metrics."""
    if not 1 <= step <= order.last_step:
        raise UsageError(f"--step {step}: the run has the steps 1 to {order.last_step:,}")
    matched = False
    for name, task in order.tasks.items():
        chosen_rows = None if document is None else {row for row, _ in entries(task.shards, document)}
        epochs, numbers = task.plan.documents(step - 1, step)
        if chosen_rows is not None and not chosen_rows & set(numbers.tolist()):
            continue
        matched = True
        reader, digest = StepReader(task, order.folder), 0
        head = f"Step {step:,} of {order.last_step:,}{f', task {name}' if name else ''}: objective "
        within = f"{len(numbers)} {task.shards.manifest.noun} of {_within(epochs)}"
        if task.plan.sizes:
            within += f" ({', '.join(_by_corpus(task, epochs, numbers))})"
        yield f"{head}{task.settings.objective.kind}, {within}, seed {task.settings.seed}", True
        for row in reader.rows(step, chosen_rows):
            digest = (digest + row.batch.spans.digest()) % DIGEST  # a sum, so that any split over workers gives it
            for line in row_lines(reader, row, limit):
                yield line, True
        if chosen_rows is None:
            yield _compared(order, name, step, digest)
    if not matched:
        raise UsageError(
            f"--document {document}: step {step} does not read it; --document alone shows the steps that do"
        )


def _within(epochs: NDArray[np.int64]) -> str:
    """The epochs of some rows; a batch takes rows of at most two of each corpus."""
    first, last = epochs.min(), epochs.max()
    return f"epoch {first}" if first == last else f"epochs {first} {'and' if last == first + 1 else 'to'} {last}"


def _by_corpus(task: TaskOrder, epochs: NDArray[np.int64], numbers: NDArray[np.int64]) -> Iterator[str]:
    """The rows of each corpus in a batch."""
    corpora = np.array([task.plan.place_of(number)[0] for number in numbers.tolist()])
    for corpus, folder in enumerate(task.shards.folders):
        if (in_corpus := corpora == corpus).any():
            yield f"{in_corpus.sum()} of {_within(epochs[in_corpus])} in {folder}"


def _compared(order: RunOrder, task: str, step: int, digest: int) -> tuple[str, bool]:
    """Compare the digest of a task's batch with the one that the run logged."""
    logged = order.logged_digest(task, step)
    folders, other = " and ".join(map(str, order.tasks[task].shards.folders)), replacement(order.tasks[task].settings)
    if logged is None and step <= order.taken:
        return f"batch digest {digest}; the step was taken, but the metrics have no whole line of it to compare", True
    if logged is None:
        newest = f"{order.taken:,}" if order.taken else "no step"
        return f"batch digest {digest}; not taken yet, the newest step in the metrics is {newest}", True
    if logged == digest:
        return f"batch digest {digest}, as the run logged it", True
    return (
        f"batch digest {digest}; the run logged {logged}, so the shards in {folders} or the "
        f"settings are not those of the run: add {order.tasks[task].settings.prefix}data={other} with the shards that "
        "it read",
        False,
    )


def row_lines(reader: StepReader, row: ReadRow, limit: int | None = None) -> Iterator[str]:
    """Show a row: place, spans with at most `limit` characters of their texts and with masks, views and facts."""
    corpus, number = reader.task.plan.place_of(row.number)
    of_corpus = f" of {reader.task.shards.folders[corpus]}" if reader.task.plan.sizes else ""
    place = f"position {row.position}: row {number:,}{of_corpus}, document {row.id}"
    yield f"{place}, {row.source} at {row.offset}, epoch {row.epoch}"
    yield from _clips(row) if reader.tokenizer is None else _spans(reader, row, limit)
    if row.roles and reader.tokenizer is not None:
        return  # the roles of the spans describe the views
    views = row.batch.views
    if views is None:
        number, width = row.batch.num_rows, reader.objective.num_views
        views = torch.arange(number * width).view(number, width)
    for number, spans in enumerate(views.tolist()):
        facts = "".join(f", {name} {int(values[number])}" for name, values in row.batch.facts.items())
        yield f"  views {number}: spans {' and '.join(map(str, spans))}{facts}"


def _spans(reader: StepReader, row: ReadRow, limit: int | None) -> Iterator[str]:
    """One line a span: its role, length, dropout rates and text; and one line for the tokens to predict."""
    spans = row.batch.spans
    assert reader.tokenizer is not None
    assert isinstance(spans, SpanBatch)
    ends = spans.lengths.cumsum(0).tolist()
    for number, (length, end) in enumerate(zip(spans.lengths.tolist(), ends, strict=True)):
        start = end - length
        chosen = ((spans.selected >= start) & (spans.selected < end)).nonzero().flatten()
        notes = [f"{length} tokens"]
        if spans.rates is not None:
            hidden, attention = spans.rates[number].tolist()
            notes.append(f"dropout {hidden:g}, of attention {attention:g}")
        if len(chosen):
            notes.append(f"{len(chosen)} to predict")
        text = reader.tokenizer.decode(spans.input_ids[start:end].tolist())
        role = f" {row.roles[number]}" if row.roles else ""
        yield f"  span {number}{role} ({'; '.join(notes)}): {text if limit is None else shorten(text, limit)}"
        if len(chosen):
            places = spans.selected[chosen]
            label_tokens = reader.tokenizer.convert_ids_to_tokens(spans.labels[chosen].tolist())
            input_tokens = reader.tokenizer.convert_ids_to_tokens(spans.input_ids[places].tolist())
            masks = zip((places - start).tolist(), label_tokens, input_tokens, strict=True)
            predictions = ", ".join(f"{place} {own}" + (f" as {seen}" * (own != seen)) for place, own, seen in masks)
            yield f"    to predict: {predictions}"


def _clips(row: ReadRow) -> Iterator[str]:
    """One line a clip: its patches."""
    spans = row.batch.spans
    assert isinstance(spans, PatchBatch)
    for number, values in enumerate(spans.values.split(spans.lengths.tolist())):
        role = f"; {row.roles[number]}" if row.roles else ""
        yield f"  clip {number}: {len(values) - 1:,} patches of {values.shape[1]:,} values{role}"  # without CLS
