"""`declutr inspect PATH`: descriptions of shards, a run, a checkpoint or an exported encoder.

`declutr inspect SHARDS --document WHICH`: place of a document, reason for dropping it, its content.

Rows of documents, sentences, pairs, triples, images and clips as lines of text.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from declutr.common.console.terminal import duration, shorten
from declutr.common.errors import CheckpointError, DamagedError, ShardError, UsageError
from declutr.encoders.protocol import is_adaptation
from declutr.inspection.order import stored_config
from declutr.pipeline.duplicates.pairs import OTHER_LABEL, removed
from declutr.pipeline.job.outcome import in_words, summary, unknown_hint
from declutr.pipeline.job.worker import REASONS
from declutr.pipeline.shards.content import LABELS, size_noun
from declutr.pipeline.shards.lookup import entries_at, find_entries
from declutr.pipeline.shards.manifest import MANIFEST, SPLITS, TOKENIZER, load_manifest
from declutr.pipeline.shards.shards import ShardSet, check_shards, tokenizer_problem
from declutr.pipeline.shards.windows import Geometry, ShortDocuments
from declutr.trainer.checkpoints import checkpoint
from declutr.trainer.checkpoints.checkpoint import CHECKPOINTS
from declutr.trainer.checkpoints.state import EXPORT, SETTINGS, read_settings
from declutr.trainer.metrics.metrics import read_metrics

_SHOWN_CHARACTERS, _SHOWN_OF_LABEL = 160, 80  # at most as many tokens are decoded: a document may be long
_FILE = "tokenizer.json"


def row_lines(shards: ShardSet, rows: Sequence[int]) -> Iterator[str]:
    """Show rows of shards by number: the beginning of a document, each text of a row, or facts of an image or clip."""
    kind, media = shards.manifest.content.kind, shards.manifest.tokenizer is None
    decode = None if media else decoder(shards.folder)
    for number, row in zip(rows, shards.take(np.array(rows, np.int64)).to_pylist(), strict=True):
        if not media:
            size = f"{row['num_tokens']:,} tokens"
        elif "image" in row:
            size = f"{row['width']} x {row['height']} pixels, {len(row['image']):,} bytes of PNG"
        else:
            size = f"{row['num_frames']:,} frames"
        yield f"- row {number} ({row['id'].hex()}, {row['source']}): {size}"
        if decode is None:
            yield f"    label {shorten(repr(row['label']), _SHOWN_OF_LABEL)}"
            continue
        if kind == "documents":
            yield f"    {shorten(decode(row['tokens'][:_SHOWN_CHARACTERS]), _SHOWN_CHARACTERS)}"
            continue
        ends = [*row["starts"][1:], row["num_tokens"]]
        for start, end, label in zip(row["starts"], ends, row["labels"], strict=True):
            name = LABELS[label] if label >= 0 else "sentence" if kind == "sentences" else "premise"
            text = shorten(decode(row["tokens"][start:end]), _SHOWN_CHARACTERS)
            yield f"    {name:13s} {end - start:4d} tokens  {text}"


def decoder(shards: Path) -> Callable[[Sequence[int]], str]:
    """A function from tokens to text, with specials; without transformers, whose import outlasts a look at shards."""
    if problem := tokenizer_problem(shards):
        raise ShardError(problem)
    file = shards / TOKENIZER / _FILE
    if not file.is_file():  # a tokenizer that is only implemented in Python
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(file.parent, trust_remote_code=False)  # None would ask at a terminal
        return lambda ids: str(slow.decode(ids)).strip()
    from tokenizers import Tokenizer  # transformers takes longer to load than a look at shards

    fast = Tokenizer.from_file(str(file))
    return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False)).strip()


_SHOWN = 20


def locate(folder: Path, document: str) -> Iterator[str]:
    """Describe the documents that `document` names: a hexadecimal id or its beginning, a source, or `SOURCE:OFFSET`."""
    manifest = load_manifest(folder)
    unit_noun = size_noun(manifest.content.kind)
    of_text, done = (" of text", "tokenized") if manifest.tokenizer else (" of its file", "decoded")
    count = 0
    for unit, ordinal, entry in find_entries(folder, document):
        count += 1
        if count > _SHOWN:  # an id may be short, and a source may hold millions
            yield f"... and more; only {_SHOWN} are shown"
            return
        yield f"Document {entry.id.hex() if entry.id else '(without an id)'}: {entry.source} at {entry.offset}"
        yield f"  read by unit {unit} as its document {ordinal}; {entry.text_bytes:,} bytes{of_text}" + (
            f", {entry.num_tokens:,} {unit_noun}" if entry.num_tokens is not None else f", not {done}"
        )
        if entry.language:
            yield f"  language: {entry.language}"
        if entry.status not in SPLITS:
            detail = f" ({entry.detail})" if entry.detail else ""
            yield f"  {'dropped' if entry.id else 'failed'}: {entry.status}{detail}"
            if entry.status in (*REASONS.values(), OTHER_LABEL):
                copy = removed(folder, unit)[0][ordinal]
                (kept,) = entries_at(folder, [(int(copy.kept_unit), copy.kept_ordinal)]).values()
                yield f"  the copy that is kept: {copy.kept_id.hex()}, {kept.source} at {kept.offset}"
            continue
        shard = f"{entry.status}-{unit}.arrow"
        shards = ShardSet(folder, entry.status)
        number = shards.first_of(shard) + (entry.row or 0)
        yield f"  kept: row {entry.row} of {shard}, document {number} of the split {entry.status}"
        if entry.detail:
            yield f"  note: {entry.detail}"
        yield from row_lines(shards, [number])
    if not count:
        parts = document.split("/")
        tails = ("/".join(parts[start:]) for start in range(1, len(parts)))  # as typed from outside the folder
        shorter = next((tail for tail in tails if any(find_entries(folder, tail))), "")
        near = f"; sources are named from inside their folder, so try {shorter}" if shorter else ""
        raise UsageError(
            f"{folder}: no document matches {document!r}{near}; give an id (at least 8 hexadecimal digits), a source "
            "or SOURCE:OFFSET from the ledger"
        )


def describe(path: Path, num_documents: int = 3) -> Iterator[str]:
    """Describe shards (with some of their rows), a checkpoint or an exported encoder, in lines."""
    if (path / MANIFEST).is_file():
        yield from _shards(path, num_documents)
    elif is_adaptation(path):
        raise UsageError(f"{path} is an adaptation: open {path / 'report.html'}")
    elif (path / "state.json").is_file():
        state = checkpoint.read_state(path)
        yield f"Checkpoint after step {state.step}: {state.documents:,} documents read by {state.world_size} worker(s)"
        yield f"  configuration {state.config_hash[:16]}, data {state.data_hash[:16]}; checksums of all files verified"
        yield from (f"  {name} {value:.4f}" for name, value in state.scores.items())
    elif (path / SETTINGS).is_file():
        try:
            settings = read_settings(path)
        except DamagedError as error:
            raise UsageError(f"{error}; the run's `declutr train` command exports the encoder again") from error
        yield f"Exported encoder after {settings.step} steps, pooling {settings.pooling}"
        yield f"  its card: {path / 'README.md'}"
    elif (path / "modules.json").is_file() or (path / "config.json").is_file():
        raise UsageError(f"{path} is an encoder, but no run exported it; `declutr evaluate` scores it")
    else:
        raise UsageError(f"{path}: found no manifest of shards, run, checkpoint or exported encoder; name one of them")


def _shards(path: Path, num_documents: int) -> Iterator[str]:
    manifest = load_manifest(path)
    kind, tokenizer = manifest.content.kind, manifest.tokenizer
    yield f"Shards, rows of {kind}, schema version {manifest.schema_version}: {summary(manifest, str(path))}"
    if manifest.failed:  # the line above has them in one list with what was dropped
        yield f"  {manifest.totals['failed']:,} failed: {in_words(manifest.failed)}"
    yield from (f"    {failure}" for failure in manifest.failures[:5])
    if hint := unknown_hint(manifest):
        yield f"  {hint}"
    longest = f"{manifest.totals['longest_tokens']:,} {size_noun(kind)}"
    room = _room(manifest.geometry, manifest.short_documents) if kind == "documents" else ""
    yield f"  {longest} in the longest {manifest.noun.removesuffix('s')}{room}"
    if tokenizer is not None:
        made_by = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, fingerprint {tokenizer.fingerprint[:16]}"
        yield f"  tokenizer: {made_by}"
    problems = check_shards(path, full=True, tokenizer=True)  # reads every byte
    yield from (f"  PROBLEM: {problem}" for problem in problems)
    if problems:  # rows of damaged shards may be anything
        raise ShardError(f"{path}: problems, named above: {len(problems)}")
    yield "  all files whole, checksums as in the manifest"
    if not num_documents:
        return
    shards = ShardSet(path, "train")
    shards = shards if shards.num_documents else shards.held_out()
    rows = np.linspace(0, shards.num_documents - 1, min(num_documents, shards.num_documents)).astype(int).tolist()
    yield from row_lines(shards, rows)


def _room(geometry: Geometry, short_documents: ShortDocuments) -> str:
    """Describe the windows and anchors of the documents."""
    shorter = f", {geometry.min_tokens} or more in short documents" if short_documents == "shrink_spans" else ""
    where = {"fewer_anchors": "a document, fewer in short ones", "shrink_spans": "each"}
    anchors = f"room for {geometry.num_anchors} anchors in {where.get(short_documents, 'every document')}"
    return f"; windows of {geometry.max_tokens} tokens{shorter}, {anchors}"


@dataclass(frozen=True)
class CheckpointRow:
    """Facts about one checkpoint."""

    step: int  # optimizer steps done
    broken: str | None  # reason why it cannot be used; None if all checksums match
    age_seconds: float | None  # seconds since it was written; None if unknown
    size_bytes: int  # size of all its files
    documents: int | None = None  # documents read so far; None, like the next fields, if the state cannot be read
    world_size: int | None = None  # workers that took the last step
    skipped: int | None = None  # steps so far whose update was skipped
    scores: dict[str, float] = field(default_factory=dict)  # held-out scores; empty without validation
    # `last`, `best`, `every`; empty if it is deleted with the next checkpoint.
    kept: list[str] = field(default_factory=list)


def checkpoint_rows(run: Path, verify: bool = True) -> list[CheckpointRow]:
    """List the checkpoints of a run, oldest first; reads all of their bytes, without `verify` only their sizes."""
    folder = run / CHECKPOINTS
    if not folder.is_dir():
        raise UsageError(f"{run}: --json and --fast are of a run's checkpoints; manifest.json describes shards")
    config = stored_config(run)
    now, steps = time.time(), checkpoint.steps_in(folder)
    seen = (_row(checkpoint.checkpoint_path(folder, step), step, now, verify) for step in steps)
    rows = [row for row in seen if row is not None]
    scores = {row.step: row.scores.get(config.validation.score) for row in rows if row.broken is None}
    why = checkpoint.kept(scores, config.checkpoint)  # by its own rules
    return [replace(row, kept=why.get(row.step, [])) for row in rows]


def _row(path: Path, step: int, now: float, verify: bool) -> CheckpointRow | None:
    """The checkpoint's row; None if its run has deleted it meanwhile."""
    try:
        files = [file.stat() for file in path.iterdir() if file.is_file()]
    except FileNotFoundError:
        return None
    age = round(now - max(file.st_mtime for file in files), 1) if files else None  # of the end of its save
    size = sum(file.st_size for file in files)
    try:
        state = checkpoint.read_state(path, verify)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ").splitlines()[0]
        return CheckpointRow(step, reason, age, size) if path.is_dir() else None  # else deleted while it was read
    return CheckpointRow(step, None, age, size, state.documents, state.world_size, state.skipped, state.scores)


def _table(rows: list[CheckpointRow], verified: str) -> Iterator[str]:
    if not rows:
        yield "  no checkpoint yet"
        return
    yield f"{'step':>8s} {'documents':>12s} {'age':>8s} {'MiB':>9s} {'workers':>8s}  {'kept':16s} state"
    for row in rows:
        documents = "?" if row.documents is None else f"{row.documents:,}"
        old = "?" if row.age_seconds is None else duration(row.age_seconds)
        scores = "  ".join(f"{name} {value:.4f}" for name, value in row.scores.items())
        state = verified if row.broken is None else f"BROKEN: {row.broken}"
        why = ", ".join(row.kept) or "-"
        skipped = f"  {row.skipped} steps skipped" if row.skipped else ""
        yield (
            f"{row.step:8d} {documents:>12s} {old:>8s} {row.size_bytes / 2**20:9.1f} "
            f"{'?' if row.world_size is None else row.world_size:>8}  {why:16s} {state}{skipped}  {scores}"
        ).rstrip()


def describe_run(path: Path, rows: list[CheckpointRow], verified: bool) -> Iterator[str]:
    """Describe a run in lines; `rows` are its checkpoints, `verified` if their bytes were read."""
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
    yield from _table(rows, "verified" if verified else "whole by its sizes")
    yield f"  exported to {path / EXPORT}" if (path / EXPORT).is_dir() else "  not exported yet"


def _number(value: float | None, form: str = ".4f") -> str:
    return "unknown" if value is None else format(value, form)
