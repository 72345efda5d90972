"""Messages on the outcome of a preparation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.table import OTHER_LABEL
from declutr.pipeline.media.media_rows import NO_LABEL
from declutr.pipeline.readers.corpus import NO_TEXT, SUFFIXES, ReadFailure, bare_suffix
from declutr.pipeline.shards.content import MEDIA_KINDS, AnyContent, PairsContent, keys_of, noun_of, size_noun
from declutr.pipeline.shards.manifest import Counts, Manifest, Sidecar
from declutr.pipeline.shards.windows import EMPTY, TOO_SHORT, limit_in_words
from declutr.pipeline.texts import LACKS

_EXAMPLES = 10
_NOT_TEXT = "the files are not text in UTF-8; name text files in corpus.paths, or convert them"
_REMEDIES = {
    NO_TEXT: "set corpus.text_field to the key or column of the text, "
    " or to several, as in corpus.text_field=[title,body]",
    "invalid_utf8": _NOT_TEXT,
    "nul_bytes": _NOT_TEXT,
}
"""Remedies by the most frequent reason of failures."""


def nothing_kept(counts: Counts, config: PipelineConfig, failures: Sequence[ReadFailure] = ()) -> str | None:
    """An error message if no document was kept, else None.

    Args:
        counts: counts of all units.
        config: settings.
        failures: examples of failures.
    """
    if counts.kept:
        return None
    if counts.read == 0:
        return "corpus: empty, the inputs hold no documents; check corpus.paths"
    if config.content.kind != "documents":
        return _no_row(counts, config.content, failures)
    failed = ", ".join(f"{number} {reason}" for reason, number in counts.failed.items())
    could_not = f" ({failed})" if failed else ""
    if 2 * sum(counts.failed.values()) > counts.read:
        return _unread(counts, failed, failures)
    other_reasons = ", ".join(
        f"{number} {reason}" for reason, number in counts.dropped.items() if reason not in (EMPTY, TOO_SHORT)
    )
    if TOO_SHORT not in counts.dropped:
        what = other_reasons or "all are empty"
        return f"corpus: none of {counts.read} documents is kept{could_not}: {what}; check the inputs and `filters`"
    could_not += f" (others: {other_reasons})" if other_reasons else ""
    return (
        f"corpus: none of {counts.read} documents is long enough{could_not}: the longest has {counts.longest_tokens} "
        f"tokens, the limit is {limit_in_words(config.geometry, config.short_documents)}; lower one of them or use "
        "longer documents"
    )


def _unread(counts: Counts, failed: str, failures: Sequence[ReadFailure]) -> str:
    """An error message if no document was kept and most could not be read."""
    num_failed = sum(counts.failed.values())
    what = f"{num_failed} of {counts.read} documents could not be read ({failed}), and none of the others is kept"
    if num_failed == counts.read:
        what = f"no document could be read, all {counts.read} failed ({failed})"
    main_reason = max(counts.failed, key=lambda reason: counts.failed[reason])
    remedy = _REMEDIES.get(main_reason, "check corpus.paths and corpus.format")
    example = next((failure for failure in failures if failure.reason == main_reason), None)
    return f"corpus: {what}; {remedy}" + (f". The first {main_reason}: {example}" if example else "")


def _no_row(counts: Counts, content: AnyContent, failures: Sequence[ReadFailure]) -> str:
    """An error message if no row of short texts was kept."""
    lost = counts.dropped | counts.failed
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(lost.items(), key=lambda item: -item[1]))
    keys = ", ".join(f"{setting}={key}" for setting, key in keys_of(content).items())
    message = f"corpus: none of {counts.read:,} records became a row of {content.kind}: {reasons}"
    if isinstance(content, PairsContent) and any(reason.startswith(LACKS) for reason in lost):
        message += (
            f"; content.required_labels = [{', '.join(content.required_labels)}] drops premises without a hypothesis "
            "of each label"
        )
    elif NO_LABEL in lost:
        message += "; content.label decides the labels, and null needs none"
    elif lost and keys:
        message += f"; read with {keys}"
    else:
        settings = "" if content.kind in MEDIA_KINDS else ", corpus.format, corpus.text_field and `filters`"
        message += f"; check corpus.paths{settings}"
    return f"{message}. The first failure: {failures[0]}" if failures else message


def lines_hint(
    read: int, dropped: Mapping[str, int], config: Mapping[str, Any], sources: Iterable[str | None]
) -> str | None:
    """A hint if most documents are empty or short and each line of a text file is a document; else None."""
    num_short = dropped.get(EMPTY, 0) + dropped.get(TOO_SHORT, 0)
    chosen = config["corpus"].get("format")
    if config["content"]["kind"] != "documents" or 2 * num_short <= read or chosen not in ("auto", "text"):
        return None
    if chosen == "auto" and not any(SUFFIXES.get(bare_suffix(source or "")) == "text" for source in sources):
        return None
    return (
        f"{num_short:,} of {read:,} documents are empty or too short, and each line of a .txt is a document; if each "
        "file is one document, set corpus.format=text_file"
    )


def too_many_failed(counts: Counts, sidecars: Sequence[Sidecar], config: PipelineConfig) -> str | None:
    """An error message if more documents failed than max_error_rate allows."""
    failed = sum(counts.failed.values())
    if failed <= config.max_error_rate * counts.read:
        return None
    by_reason = ", ".join(f"{number:,} {reason}" for reason, number in counts.failed.items())
    examples = [f"  {example}" for sidecar in sidecars for example in sidecar.failures][:_EXAMPLES]
    share = failed / counts.read
    percent = math.ceil(10000 * share) / 100
    head = (
        f"{failed:,} of {counts.read:,} {noun_of(config.content.kind)} failed ({by_reason}): {percent:.2f}% is more "
        f"than max_error_rate = {config.max_error_rate:g}. Repair the inputs and prepare into a new folder, or allow "
        f"more with max_error_rate={math.ceil(share * 1000) / 1000:g}; the same command then ends at once. Examples:"
    )
    return "\n".join([head, *examples])


def labels_hint(manifest: Manifest) -> str | None:
    """A warning with an example if copies of an image or clip have several labels, else None."""
    if manifest.conflict is None:
        return None
    return (
        f"{manifest.dropped[OTHER_LABEL]:,} copies have another label than the row that is kept, which is the first in "
        f"the order of the corpus; correct the labels, or remove both. The first: {manifest.conflict}"
    )


def summary(manifest: Manifest, output: str) -> str:
    """One line with the output folder, the documents read and their statuses."""
    totals = manifest.totals
    lost = ", ".join(f"{number:,} {reason}" for reason, number in [*manifest.dropped.items(), *manifest.failed.items()])
    skipped = ", ".join(f"{skip.files:,} {kind} ({skip.example!r})" for kind, skip in manifest.skipped.items())
    left = skipped and f"; not read: {skipped}"
    return (
        f"{output}: {totals['read']:,} {manifest.noun} read, {totals['kept']:,} kept ({totals['kept_train']:,} train, "
        f"{totals['kept_held_out']:,} held out){f', {lost}' if lost else ''}; {totals['num_tokens']:,} "
        f"{size_noun(manifest.content.kind)} in {len(manifest.shards)} shards{_labels(manifest)}{left}"
    )


def _labels(manifest: Manifest) -> str:
    """The kept hypotheses by label, or the number of labels and the changes of images or clips, as text."""
    if manifest.content.kind in MEDIA_KINDS:
        notes = ", ".join(f"{number:,} {note}" for note, number in manifest.notes.items())
        return f"; {len(manifest.labels):,} labels" + (notes and f"; changed: {notes}")
    labels = ", ".join(f"{number:,} {label}" for label, number in manifest.labels.items())
    return labels and f"; hypotheses: {labels}"
