"""Messages on the outcome of a preparation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from declutr.common.errors import shown_value
from declutr.pipeline.config import PipelineConfig
from declutr.pipeline.duplicates.pairs import OTHER_LABEL
from declutr.pipeline.media.media_rows import NO_LABEL
from declutr.pipeline.readers.corpus import NO_TEXT, SUFFIXES, FilesCorpus, ReadFailure, bare_suffix
from declutr.pipeline.shards.content import (
    MEDIA_KINDS,
    AnyContent,
    ContentKind,
    PairsContent,
    keys_of,
    noun_of,
    size_noun,
)
from declutr.pipeline.shards.ledger import Losses
from declutr.pipeline.shards.manifest import Counts, Manifest
from declutr.pipeline.shards.windows import EMPTY, TOO_SHORT, limit_in_words
from declutr.pipeline.texts import LACKS

_EXAMPLES = 10
_MUCH_OF_A_FILE, _LEAST_ROWS = 0.1, 10  # share of failures, of a file with that many rows and more
_MANY_UNKNOWN = 0.01
_OF_HUB = "corpus.name, corpus.config and corpus.text_field"
_NOT_TEXT = "the files are not text in UTF-8; name text files in corpus.paths, or convert them"
# Remedies by the most frequent reason of failures.
_REMEDIES = {
    NO_TEXT: "set corpus.text_field to the key or column of the text, or to several, as in "
    "corpus.text_field=[title,body]",
    "invalid_utf8": _NOT_TEXT,
    "nul_bytes": _NOT_TEXT,
}


def nothing_kept(
    counts: Counts,  # counts of all units
    config: PipelineConfig,  # settings
    failures: Sequence[ReadFailure] = (),  # examples of failures
) -> str | None:
    """An error message if no document was kept, else None."""
    if counts.kept:
        return None
    if counts.read == 0:
        names = f" = {shown_value(config.corpus.paths)}" if isinstance(config.corpus, FilesCorpus) else ""
        return f"corpus: empty, the inputs hold no documents; check {'corpus.paths' if names else _OF_HUB}{names}"
    from_hub = not isinstance(config.corpus, FilesCorpus)
    if config.content.kind != "documents":
        return _no_row(counts, config.content, failures, from_hub)
    failed, num_failed = in_words(counts.failed), sum(counts.failed.values())
    documents = f"{counts.read} documents"
    if 2 * num_failed > counts.read:
        problem = f"{num_failed} of {documents} could not be read ({failed}), and none of the others is kept"
        if num_failed == counts.read:
            problem = f"no document could be read, all {counts.read} failed ({failed})"
        main_reason = max(counts.failed, key=lambda reason: counts.failed[reason])
        remedy = _REMEDIES.get(main_reason, f"check {_OF_HUB if from_hub else 'corpus.paths and corpus.format'}")
        examples = [f". The first {main_reason}: {failure}" for failure in failures if failure.reason == main_reason]
        return f"corpus: {problem}; {remedy}" + "".join(examples[:1])
    unread = f" ({failed})" if failed else ""
    other_reasons = in_words({reason: n for reason, n in counts.dropped.items() if reason not in (EMPTY, TOO_SHORT)})
    if TOO_SHORT not in counts.dropped:
        why = other_reasons or "all are empty"
        return f"corpus: none of {documents} is kept{unread}: {why}; check the inputs and `filters`"
    unread += f" (others: {other_reasons})" if other_reasons else ""
    return (
        f"corpus: none of {documents} is long enough{unread}: the longest has {counts.longest_tokens} tokens, the "
        f"limit is {limit_in_words(config.geometry, config.short_documents)}; lower one of them or use longer documents"
    )


def in_words(numbers: Mapping[str, int]) -> str:
    """Numbers by reason in one line."""
    return ", ".join(f"{number:,} {reason}" for reason, number in numbers.items())


def _no_row(counts: Counts, content: AnyContent, failures: Sequence[ReadFailure], from_hub: bool) -> str:
    """An error message if no row of short texts, images or clips was kept."""
    lost = dict(sorted((counts.dropped | counts.failed).items(), key=lambda item: -item[1]))
    keys = ", ".join(f"{setting}={key}" for setting, key in keys_of(content).items())
    message = f"corpus: none of {counts.read:,} records became a row of {content.kind}: {in_words(lost)}"
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
        message += f"; check {_OF_HUB if from_hub else f'corpus.paths{settings}'}"
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
        f"file is one document, set corpus.format={'text_file' if chosen == 'text' else 'auto_text_file'}"
    )


def too_many_failed(
    counts: Counts, failures: Sequence[ReadFailure], max_error_rate: float, kind: ContentKind, losses: Losses
) -> str | None:
    """An error message if more documents failed, or are lost with files that break off, than max_error_rate allows."""
    failed, lost = sum(counts.failed.values()), losses.documents()
    share = (failed + lost) / max(1, counts.read + lost)
    if share <= max_error_rate:  # the quotient, because 0.29 * 100 is less than 29 in floats
        return None
    percent = math.ceil(10000 * share) / 100  # rounded up, or it could seem to be within the limit
    not_text = " (write them in UTF-8)" if "invalid_utf8" in counts.failed else ""
    head = (
        f"{failed:,} of {counts.read:,} {noun_of(kind)} failed ({in_words(counts.failed)})"
        f"{f', and about {lost:,} more are lost with their files' if lost else ''}: "
        f"{percent:.2f}% is more than max_error_rate = {max_error_rate:g}. Repair the inputs{not_text} and prepare "
        # Rounded up, or it would not be enough.
        f"into a new folder, or allow more with max_error_rate={math.ceil(share * 1000) / 1000:g}; the same "
        "command then ends at once. Examples:"
    )
    lines = [*losses_hint(losses, kind), *map(str, failures[:_EXAMPLES])]
    return "\n".join([head, *(f"  {line}" for line in lines)])


def losses_hint(losses: Losses, kind: ContentKind) -> Sequence[str]:
    """Lines on files that break off, and on the first ones of which a tenth and more could not be read."""
    lines, worst, nouns = list[str](), list[str](), noun_of(kind)
    if lost := losses.documents():
        num_broken = sum(file["broken"] for file in losses.files.values())
        num_files = len(losses.files) + sum(num_whole for num_whole, _ in losses.whole.values())
        broken = f"{num_broken:,} of {num_files:,} files break off"
        lines.append(f"{broken}, with about {lost:,} more {nouns}, by those in whole files")
    if cuts := {source: file["cut"] for source, file in losses.files.items() if file["cut"]}:
        lines.append(f"{sum(cuts.values()):,} cuts of {nouns} above corpus.max_document_mib, as in {next(iter(cuts))}")
    for source, file in losses.files.items():
        rows = file["read"] + file["failed"]
        if rows >= _LEAST_ROWS and file["failed"] > _MUCH_OF_A_FILE * rows:
            worst.append(f"{source}: {file['failed']:,} of {rows:,} {nouns} failed")
    lines += worst[:_EXAMPLES]
    return [*lines, *([f"and {len(worst) - _EXAMPLES:,} more such files"] if len(worst) > _EXAMPLES else [])]


def lost_hint(manifest: Manifest) -> str | None:
    """The number of documents that are lost with files that break off, in words; None without such."""
    lost = manifest.totals.get("lost", 0)
    return f"about {lost:,} lost with files that break off" if lost else None


def unknown_hint(manifest: Manifest) -> str | None:
    """A warning if the tokenizer does not know a hundredth and more of the words; else None."""
    unknown, tokens = manifest.totals.get("unknown_tokens", 0), manifest.totals["num_tokens"]
    if unknown <= _MANY_UNKNOWN * tokens:
        return None
    return (
        f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.1%}) stand for words that the tokenizer does not know, "
        "and say nothing; take a tokenizer or base model of the corpus's language and letters, or in `prepare` "
        "tokenizer.kind=train"
    )


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
    lost = ", ".join(filter(None, [in_words(manifest.dropped), in_words(manifest.failed), lost_hint(manifest)]))
    share = totals.get("unknown_tokens", 0) / max(1, totals["num_tokens"])
    unknown = f" ({share:.2%} unknown)" if share else ""
    skipped = ", ".join(f"{skip.files:,} {kind} (such as {skip.example!r})" for kind, skip in manifest.skipped.items())
    left = skipped and f"; not read: {skipped}"
    return (
        f"{output}: {totals['read']:,} {manifest.noun} read, {totals['kept']:,} kept ({totals['kept_train']:,} train, "
        f"{totals['kept_held_out']:,} held out){f', {lost}' if lost else ''}; {totals['num_tokens']:,} "
        f"{size_noun(manifest.content.kind)}{unknown} in {len(manifest.shards)} shards{_labels(manifest)}{left}"
    )


def _labels(manifest: Manifest) -> str:
    """The kept hypotheses by label, or the number of labels and the changes of images or clips, as text."""
    if manifest.content.kind in MEDIA_KINDS:
        notes = in_words(manifest.notes)
        return f"; {len(manifest.labels):,} labels" + (notes and f"; changed: {notes}")
    return f"; hypotheses: {in_words(manifest.labels)}" if manifest.labels else ""
