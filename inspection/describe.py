"""`declutr inspect PATH`: descriptions of shards, a run, a checkpoint or an exported encoder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from declutr.common.console.terminal import shorten
from declutr.common.scores import comparable, read_scores
from declutr.common.storage import DamagedError
from declutr.inspection.rows import decoder, media_lines, text_lines
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.shards.manifest import MANIFEST, Manifest, load_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards, document_keys, ragged
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.driver.exported import EXPORT, SETTINGS, read_settings
from declutr.trainer.driver.shard_checks import kind_problem
from declutr.trainer.metrics.metrics import read_metrics
from declutr.trainer.objectives.declutr.spans import draw, place
from declutr.trainer.objectives.span_config import SpanConfig
from declutr.trainer.setup.config import TrainConfig

_SHOWN_CHARACTERS = 160


class DescribeError(ValueError):
    """A path without shards, run, checkpoint or exported encoder."""


def describe(
    path: Path, num_documents: int = 3, seed: int = 0, epoch: int = 0, run: TrainConfig | None = None
) -> Iterator[str]:
    """Describe shards (with the spans of some documents), a run, a checkpoint or an exported encoder, in lines.

    With a run, its views of rows of short texts are shown.

    Raises:
        DescribeError: `path` holds none of these, or the run's objective cannot read its rows.
        ObjectiveError: the run's objective cannot be loaded.
        ShardError: a manifest that cannot be read.
        CheckpointError: a checkpoint that is incomplete or altered.
    """
    if (path / MANIFEST).is_file():
        yield from _shards(path, num_documents, seed, epoch, run)
    elif (path / "state.json").is_file():
        yield from _checkpoint(path)
    elif (path / SETTINGS).is_file():
        try:
            settings = read_settings(path)
        except DamagedError as error:
            raise DescribeError(f"{error}; the run's `declutr train` command exports the encoder again") from error
        yield f"Exported encoder after {settings.step} steps, pooling {settings.pooling}"
        yield f"  its card: {path / 'README.md'}"
    elif (path / CHECKPOINTS).is_dir():
        yield from _run(path)
    else:
        raise DescribeError(f"{path}: found no manifest of shards, run, checkpoint or exported encoder")


def _shards(path: Path, num_documents: int, seed: int, epoch: int, run: TrainConfig | None) -> Iterator[str]:
    manifest = load_manifest(path)
    totals = manifest.totals
    yield f"Shards, schema version {manifest.schema_version}: {len(manifest.shards)} files in {path}"
    yield f"  {totals['read']:,} {manifest.noun} read = {totals['kept']:,} kept + {totals['dropped']:,} dropped + " + (
        f"{totals['failed']:,} failed"
    )
    for kind, reasons in (("dropped", manifest.dropped), ("failed", manifest.failed)):
        for reason, number in reasons.items():
            yield f"  {kind}: {number:,} {reason}"
    for failure in manifest.failures[:5]:
        yield f"    {failure}"
    yield f"  {totals['kept_train']:,} for training, {totals['kept_held_out']:,} held out"
    longest = f"{totals['longest_tokens']:,} in the longest {manifest.noun.removesuffix('s')}"
    yield f"  {totals['num_tokens']:,} {size_noun(manifest.content.kind)} kept, {longest}"
    geometry, tokenizer, kind = manifest.geometry, manifest.tokenizer, manifest.content.kind
    yield f"  {_room(geometry, manifest.short_documents) if kind == 'documents' else _texts(manifest)}"
    if tokenizer is not None:
        made_by = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:16]}"
        yield f"  tokenizer: {made_by}"
    problems = check_shards(path, full=True)
    yield from (f"  PROBLEM: {problem}" for problem in problems)
    yield "  all files whole, checksums as in the manifest" if not problems else "  see the problems above"
    if problems or not num_documents:
        return
    config = default_spans(manifest)
    shards = ShardSet(path, "train")
    rows = np.linspace(0, shards.num_documents - 1, min(num_documents, shards.num_documents)).astype(np.int64)
    if kind != "documents":
        yield from row_lines(path, shards, rows.tolist(), seed, epoch, run)
        return
    yield f"Spans as epoch {epoch} of seed {seed} draws them, lengths {config.min_tokens} to {config.max_tokens}:"
    yield from span_lines(path, shards, config, rows.tolist(), seed, epoch)


def default_spans(manifest: Manifest) -> SpanConfig:
    """Spans to show without a run's settings."""
    geometry = manifest.geometry
    shortest = max(1, geometry.max_tokens // 8)
    if manifest.short_documents == "shrink_spans":
        shortest = min(shortest, geometry.min_tokens)
    return SpanConfig(num_anchors=geometry.num_anchors, max_tokens=geometry.max_tokens, min_tokens=shortest)


def row_lines(
    path: Path, shards: ShardSet, rows: Sequence[int], seed: int, epoch: int, run: TrainConfig | None
) -> Iterator[str]:
    """Show rows by number: their texts, size or length, or with a run the spans and views that it makes of the texts.

    Raises:
        DescribeError: the run's objective cannot read such rows.
        ObjectiveError: the run's objective cannot be loaded.
    """
    if run is None:
        yield from media_lines(shards, rows) if shards.manifest.tokenizer is None else text_lines(path, shards, rows)
        return
    run = run.model_copy(update={"data": str(path), "seed": seed})
    if problem := kind_problem(run, shards.manifest):
        raise DescribeError(
            problem
            + (
                f"; or name an auxiliary task: --auxiliary-task {' or '.join(run.auxiliary_tasks)}"
                if run.auxiliary_tasks
                else ""
            )
        )
    yield f"Spans and views that objective.kind = {run.objective.kind} makes in epoch {epoch} of seed {seed}:"
    from declutr.inspection.views import view_lines

    yield from view_lines(path, run, rows, epoch)


def _texts(manifest: Manifest) -> str:
    """Describe rows of short texts, images or clips."""
    if manifest.tokenizer is None:
        notes = ", ".join(f"{number:,} {note}" for note, number in manifest.notes.items())
        return f"rows of {manifest.content.kind}, {len(manifest.labels):,} labels" + (notes and f"; changed: {notes}")
    hypotheses = ", ".join(f"{number:,} {label}" for label, number in manifest.labels.items())
    return f"rows of {manifest.content.kind}" + (f", hypotheses: {hypotheses}" if hypotheses else "")


def _room(geometry: Geometry, short_documents: ShortDocuments) -> str:
    """Describe the windows and anchors of the documents."""
    tokens, anchors = geometry.max_tokens, geometry.num_anchors
    if short_documents == "fewer_anchors":
        return f"windows of {tokens} tokens, room for {anchors} anchors in a document, fewer in short ones"
    if short_documents == "shrink_spans":
        shortest = geometry.min_tokens
        return f"windows of {tokens} tokens, {shortest} or more in short documents, room for {anchors} anchors in each"
    return f"windows of {tokens} tokens, room for {anchors} anchors in every document"


def span_lines(
    path: Path, shards: ShardSet, config: SpanConfig, rows: Sequence[int], seed: int, epoch: int
) -> Iterator[str]:
    """Show documents of shards by number, with the spans that an epoch draws from them."""
    table = shards.take(np.array(rows, np.int64))
    decode = decoder(path)
    tokens, offsets = ragged(table.column("tokens"))
    windows, window_offsets = ragged(table.column("windows"))
    lengths = table.column("num_tokens").to_numpy()
    draws = draw(config, seed, np.full(len(rows), epoch, np.int64), document_keys(table))
    spans = place(config, draws, lengths, windows.astype(np.int64), window_offsets, shards.manifest.short_documents)
    for number, row in enumerate(rows):
        document = tokens[offsets[number] : offsets[number + 1]]

        def text(start: int, end: int, document: np.ndarray = document) -> str:
            return shorten(decode(document[start:end].tolist()), _SHOWN_CHARACTERS)

        source = table.column("source")[number].as_py()
        yield f"- document {row} ({table.column('id')[number].as_py().hex()}, {source}): {lengths[number]:,} tokens"
        there = spans.present[number]
        anchors, positives_ = spans.anchors[number][there].tolist(), spans.positives[number][there].tolist()
        for anchor, positives in zip(anchors, positives_, strict=True):
            yield f"    anchor   [{anchor[0]}, {anchor[1]})  {text(*anchor)}"
            for positive in positives:
                yield f"    positive [{positive[0]}, {positive[1]}) {relation(anchor, positive)}: {text(*positive)}"


def relation(anchor: list[int], positive: list[int]) -> str:
    """Position of a positive relative to its anchor, in the paper's terms."""
    if positive[1] == anchor[0] or positive[0] == anchor[1]:
        return "adjacent"
    if anchor[0] <= positive[0] and positive[1] <= anchor[1]:
        return "subsumed"
    if positive[0] <= anchor[0] and anchor[1] <= positive[1]:
        return "subsuming"
    return "overlapping"


def _checkpoint(path: Path) -> Iterator[str]:
    state = checkpoint.read_state(path)
    yield f"Checkpoint after step {state.step}: {state.documents:,} documents read by {state.world_size} worker(s)"
    yield f"  configuration {state.config_hash[:16]}, data {state.data_hash[:16]}; checksums of all files verified"
    yield from (f"  {name} {value:.4f}" for name, value in state.scores.items())


def _run(path: Path) -> Iterator[str]:
    lines = read_metrics(path)
    steps = [line for line in lines if line["kind"] == "step"]
    yield f"Run in {path}: {steps[-1]['step'] if steps else 0} steps logged"
    if steps:
        last = steps[-1]
        loss = "not finite, skipped" if last.get("skipped") else _number(last.get("loss"))
        yield f"  last step: loss {loss}, {_number(last.get('tokens_per_second'), ',.0f')} tokens/s"
    for line in lines:
        if line["kind"] == "validation":
            scores = ", ".join(f"{name} {_number(line[name])}" for name in line if name not in ("kind", "step", "time"))
            yield f"  held out after step {line['step']}: {scores}"
    for (step, _), value in comparable(read_scores(path)).items():
        yield f"  followed after step {step}: {value:.2f}"
    for step in checkpoint.steps_in(path / CHECKPOINTS):
        yield from _checkpoint(checkpoint.checkpoint_path(path / CHECKPOINTS, step))
    yield f"  exported to {path / EXPORT}" if (path / EXPORT).is_dir() else "  not exported yet"


def _number(value: float | None, form: str = ".4f") -> str:
    return "unknown" if value is None else format(value, form)
