"""`declutr inspect SHARDS --document WHICH`: place of a document, reason for dropping it, its content."""

from collections.abc import Iterator
from pathlib import Path

from declutr.common.errors import UsageError
from declutr.inspection.rows import media_lines, text_lines
from declutr.pipeline.duplicates.table import OTHER_LABEL, removed
from declutr.pipeline.job.selection import REASONS
from declutr.pipeline.shards.content import size_noun
from declutr.pipeline.shards.ledger import entries_at, find_entries
from declutr.pipeline.shards.manifest import SPLITS, load_manifest
from declutr.pipeline.shards.shards import ShardSet

_SHOWN = 20


def locate(folder: Path, document: str) -> Iterator[str]:
    """Describe every document of prepared shards that `document` names.

    `document` is an id in hexadecimal or its beginning, a source, or `SOURCE:OFFSET`.

    Raises:
        UsageError: no document matches the name.
        ShardError: a manifest that cannot be read.
    """
    manifest = load_manifest(folder)
    unit_noun = size_noun(manifest.content.kind)
    of_text, done = (" of text", "tokenized") if manifest.tokenizer else (" of its file", "decoded")
    count = 0
    for unit, ordinal, entry in find_entries(folder, document):
        count += 1
        if count > _SHOWN:
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
                copy = removed(folder, unit)[ordinal]
                (kept,) = entries_at(folder, [(int(copy.kept_unit), copy.kept_ordinal)]).values()
                yield f"  the copy that is kept: {copy.kept_id.hex()}, {kept.source} at {kept.offset}"
            continue
        shard = f"{entry.status}-{unit}.arrow"
        shards = ShardSet(folder, entry.status)
        number = shards.first_of(shard) + (entry.row or 0)
        yield f"  kept: row {entry.row} of {shard}, document {number} of the split {entry.status}"
        if entry.detail:
            yield f"  note: {entry.detail}"
        yield from text_lines(folder, shards, [number]) if manifest.tokenizer else media_lines(shards, [number])
    if not count:
        parts = document.split("/")
        tails = ("/".join(parts[start:]) for start in range(1, len(parts)))
        shorter = next((tail for tail in tails if any(find_entries(folder, tail))), "")
        near = f"; sources are named from inside their folder, so try {shorter}" if shorter else ""
        raise UsageError(
            f"{folder}: no document matches {document!r}{near}; give an id (at least 8 hexadecimal digits), a source "
            "or SOURCE:OFFSET from the ledger"
        )
