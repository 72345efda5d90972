"""`declutr why RUN --step N`: the rows of a step with their spans, masks, views and facts, as lines of text."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from declutr.common.console.terminal import shorten
from declutr.common.errors import UsageError
from declutr.inspection.order import RunOrder, TaskOrder, entries, replacement
from declutr.inspection.step_reader import ReadRow, StepReader
from declutr.trainer.data.packedbatch import DIGEST
from declutr.trainer.data.patches import PatchBatch
from declutr.trainer.driver.resolved import data_key


def step_lines(
    order: RunOrder, step: int, document: str | None = None, most: int | None = None
) -> Iterator[tuple[str, bool]]:
    """Show the rows of each task in a step; with each line, whether the digests so far are those of the run's metrics.

    Args:
        order: order of the run.
        step: 1-based step that the run has.
        document: show only the documents of this name, and compare no digest.
        most: characters of a text to show; None: all.

    Raises:
        UsageError: an objective cannot be loaded.
        UsageError: the step does not read the document, or an encoder cannot be found.
        ShardError: shards that are damaged.
    """
    shown = False
    for name, task in order.tasks.items():
        wanted = None if document is None else {row for row, _ in entries(task.shards, document)}
        epochs, numbers = task.plan.documents(step - 1, step)
        if wanted is not None and not wanted & set(numbers.tolist()):
            continue
        shown = True
        reader, digest = StepReader(task, order.folder), 0
        head = f"Step {step:,} of {order.last_step:,}{f', task {name}' if name else ''}: objective "
        noun = task.shards.manifest.noun
        within = f"{len(numbers)} {noun} of {_within(epochs)}"
        if task.plan.sizes:
            within += f" ({', '.join(_by_corpus(task, epochs, numbers))})"
        yield f"{head}{task.config.objective.kind}, {within}, seed {task.config.seed}", True
        for row in reader.rows(step, wanted):
            digest = (digest + row.batch.spans.digest()) % DIGEST
            for line in row_lines(reader, row, most):
                yield line, True
        if wanted is None:
            yield _compared(order, name, step, digest)
    if not shown:
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
        if (mine := corpora == corpus).any():
            yield f"{mine.sum()} of {_within(epochs[mine])} in {folder}"


def _compared(order: RunOrder, task: str, step: int, digest: int) -> tuple[str, bool]:
    """Compare the digest of a task's batch with the one that the run logged."""
    logged = order.logged_digest(task, step)
    folders, other = " and ".join(map(str, order.tasks[task].shards.folders)), replacement(order.tasks[task].config)
    if logged is None and step <= order.taken:
        return f"batch digest {digest}; the step was taken, but the metrics have no whole line of it to compare", True
    if logged is None:
        newest = f"{order.taken:,}" if order.taken else "no step"
        return f"batch digest {digest}; not taken yet, the newest step in the metrics is {newest}", True
    if logged == digest:
        return f"batch digest {digest}, as the run logged it", True
    return (
        f"batch digest {digest}; the run logged {logged}, so the shards in {folders} or the "
        f"settings are not those of the run: add {data_key(task)}={other} with the shards that it read",
        False,
    )


def row_lines(reader: StepReader, row: ReadRow, most: int | None = None) -> Iterator[str]:
    """Show a row: place, spans with their texts and masks, views and facts.

    Args:
        reader: reader of its task.
        row: the row.
        most: characters of a text to show; None: all.
    """
    corpus, number = reader.task.plan.place_of(row.number)
    of_corpus = f" of {reader.task.shards.folders[corpus]}" if reader.task.plan.sizes else ""
    place = f"position {row.position}: row {number:,}{of_corpus}, document {row.id}"
    yield f"{place}, {row.source} at {row.offset}, epoch {row.epoch}"
    yield from _clips(row) if reader.tokenizer is None else _spans(reader, row, most)
    if row.roles and reader.tokenizer is not None:
        return  # the roles of the spans describe the views
    views = row.batch.views
    if views is None:
        number, width = row.batch.num_rows, reader.objective.num_views
        views = torch.arange(number * width).view(number, width)
    for number, spans in enumerate(views.tolist()):
        facts = "".join(f", {name} {int(values[number])}" for name, values in row.batch.facts.items())
        yield f"  views {number}: spans {' and '.join(map(str, spans))}{facts}"


def _spans(reader: StepReader, row: ReadRow, most: int | None) -> Iterator[str]:
    """One line a span: its role, length, dropout rates and text; and one line for the tokens to predict."""
    assert reader.tokenizer is not None
    spans = row.batch.tokens
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
        yield f"  span {number}{role} ({'; '.join(notes)}): {text if most is None else shorten(text, most)}"
        if len(chosen):
            places = spans.selected[chosen]
            wanted = reader.tokenizer.convert_ids_to_tokens(spans.labels[chosen].tolist())
            shown = reader.tokenizer.convert_ids_to_tokens(spans.input_ids[places].tolist())
            masks = zip((places - start).tolist(), wanted, shown, strict=True)
            told = ", ".join(f"{place} {own}" + (f" as {seen}" * (own != seen)) for place, own, seen in masks)
            yield f"    to predict: {told}"


def _clips(row: ReadRow) -> Iterator[str]:
    """One line a clip: its patches, and the range of their values."""
    spans = row.batch.spans
    assert isinstance(spans, PatchBatch)
    for number, values in enumerate(spans.values.split(spans.lengths.tolist())):
        patches = values[1:]  # behind the CLS token
        lowest, highest = float(patches.min()), float(patches.max())
        size = patches.shape[1]
        role = f"; {row.roles[number]}" if row.roles else ""
        yield f"  clip {number}: {len(patches):,} patches of {size:,} values from {lowest:g} to {highest:g}{role}"
