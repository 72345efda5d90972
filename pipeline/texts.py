"""Rows of a corpus, made from the records of its readers according to the `content` section of `prepare`.

Documents are split into sentences by `sentencex`, a rule-based segmenter of the Wikimedia Foundation. The pairs of a
file are grouped by premise in memory, so a file of pairs is never cut.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from declutr.pipeline.filters.document_filter import normalise
from declutr.pipeline.readers.corpus import MIB, Document, Fields, ReadFailure, Record, Rejected, document_id, failed
from declutr.pipeline.shards.content import (
    ENTAILMENT,
    LABELS,
    NO_LABEL,
    TRIPLE_LABELS,
    AnyContent,
    Label,
    PairsContent,
    SentencesContent,
    TriplesContent,
)
from declutr.pipeline.shards.windows import EMPTY

# Characters that are split at a time: with some scripts the segmenter's time grows with the square of its input.
_WINDOW_CHARACTERS = 1 << 14
MAX_FILE_BYTES = 1024 * MIB  # largest file of pairs, and most characters of the pairs of a file that are held
LACKS = "lacks_"
_PLACES = {"-": NO_LABEL, str(NO_LABEL): NO_LABEL}  # SNLI's own files have -, the hub's -1
_PLACES |= {name: place for place, label in enumerate(LABELS) for name in (label, str(place))}
"""Place in LABELS of each label as it is written; NO_LABEL if annotators did not agree."""
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, slots=True)
class TextRow(Document):
    """A premise and its hypotheses; `text` joins them by newlines, for the rules that look at one text."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]  # label of each text; NO_LABEL for the premise


def make_row(texts: tuple[str, ...], labels: tuple[int, ...], source: str, offset: int) -> TextRow:
    """The row of a premise and its hypotheses."""
    return TextRow("\n".join(texts), source, offset, texts, labels)


def texts_of(record: Record) -> tuple[str, ...]:
    """The texts of a record that may become part of a shard."""
    if isinstance(record, TextRow):
        return record.texts
    return () if isinstance(record, (ReadFailure, Rejected)) else (record.text,)


def row_id(texts: tuple[str, ...], labels: tuple[int, ...]) -> bytes:
    """16 bytes that identify a row: a hash of its texts and labels, in order."""
    # Joined by a sign, others could give these bytes.
    return document_id(json.dumps([texts, labels], ensure_ascii=False).encode())


def rows(records: Iterator[Record], content: AnyContent) -> Iterator[Record]:
    """The rows of a corpus, and the failures of its readers."""
    match content:
        case SentencesContent(split=True, language=language):
            return split_documents(records, language)
        case PairsContent():
            return pair_rows(records, content.required_labels)
        case TriplesContent():
            return triple_rows(records)
        case _:
            return records


def split_documents(records: Iterator[Record], language: str) -> Iterator[Record]:
    """The sentences of each document, with the document's offset. A document without text stays one empty record."""
    for record in records:
        if isinstance(record, ReadFailure):
            yield record
            continue
        empty = True
        for sentence in sentences(record.text, language):
            empty = False
            yield Document(sentence, record.source, record.offset)
        if empty:
            yield Document("", record.source, record.offset)


def sentences(text: str, language: str) -> Iterator[str]:
    """The sentences of a text that are not blank. Together they have all its characters, except blank stretches.

    A sentence ends at a blank line at the latest. One of more than 16,384 characters is cut.
    """
    from sentencex import get_sentence_boundaries  # imported here because only this setting needs it

    start = 0
    while start < len(text):
        window = text[start : start + _WINDOW_CHARACTERS]
        starts = [boundary["start_index"] for boundary in get_sentence_boundaries(language, window)]
        if start + len(window) < len(text) and len(starts) > 1:
            window = window[: starts.pop()]  # the last sentence may continue after the window
        for first, stop in zip([0, *starts[1:]], [*starts[1:], len(window)], strict=True):
            if sentence := window[first:stop].strip():
                yield sentence
        start += len(window)


def pair_rows(
    records: Iterator[Record],  # failures, and `Fields` of premise and hypothesis, with the label if there is one
    required_labels: Sequence[Label],  # labels of which a premise must have a hypothesis each
) -> Iterator[Record]:
    """Failures and single pairs that a file leaves out, then a row for each premise, in order of first occurrence."""
    # Within a file: over files it would take a shuffle of the corpus.
    for source, group in groupby(records, key=lambda record: record.source):
        # Of each premise as it is first written: its text and offset; its hypotheses by normalised text and label.
        premises: dict[str, tuple[str, int, dict[tuple[str, int], str]]] = {}
        num_characters = 0
        for record in group:
            pair = _pair(record)
            if not isinstance(pair, tuple):
                yield pair
                continue
            premise, hypothesis, label = pair
            _, _, hypotheses = premises.setdefault(normalise(premise), (premise, record.offset, {}))
            key = (normalise(hypothesis), label)
            if key in hypotheses:
                yield _rejected((premise, hypothesis), source, record.offset, "repeated_pair")
                continue
            hypotheses[key] = hypothesis
            num_characters += len(premise) + len(hypothesis)
            if num_characters > MAX_FILE_BYTES:
                raise OSError(
                    f"{source}: its pairs have more than {MAX_FILE_BYTES // MIB:,} Mi characters, and the pairs of a "
                    "file are held in memory; split it into files with different premises"
                )
        for premise, offset, hypotheses in premises.values():
            labels = tuple(label for _, label in hypotheses)
            texts = (premise, *hypotheses.values())
            lacking = [label for label in required_labels if LABELS.index(label) not in labels]
            if lacking:
                yield _rejected(texts, source, offset, LACKS + lacking[0])
            else:
                yield make_row(texts, (NO_LABEL, *labels), source, offset)


def triple_rows(records: Iterator[Record]) -> Iterator[Record]:
    """A row for each `Fields` of sentence, entailed and contradicting sentence; failures stay."""
    for record in records:
        if not isinstance(record, Fields):
            yield record
            continue
        texts = _texts(record, ("premise", "entailment", "contradiction"))
        if isinstance(texts, tuple):
            yield make_row(texts, TRIPLE_LABELS, record.source, record.offset)
        else:
            yield texts


def _pair(record: Record) -> tuple[str, str, int] | Record:
    """Premise, hypothesis and label of a record, or the reason why it is no pair."""
    if not isinstance(record, Fields):
        return record
    if not record.values:
        return _rejected(("",), record.source, record.offset, EMPTY)
    label: int | None = ENTAILMENT
    if len(record.values) > 2:
        label = _PLACES.get(str(record.values[-1]).strip().lower())  # a number in Parquet and JSON
    if label is None:
        choices = f"{', '.join(LABELS)}, 0, 1, 2; - and -1 mean that there is none"
        value = repr(record.values[-1])
        value = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."
        return failed("unknown_label", record.source, record.offset, f"label {value} is unknown; known are {choices}")
    texts = _texts(record, ("premise", "hypothesis"))
    if not isinstance(texts, tuple):
        return texts
    if label == NO_LABEL:
        return _rejected(texts, record.source, record.offset, "no_gold_label")
    return texts[0], texts[1], label


def _texts(record: Fields, names: Sequence[str]) -> tuple[str, ...] | Record:
    """The texts of a record; its failure if one is a number, and the left-out row if one is empty or null."""
    if not record.values:
        return _rejected(("",), record.source, record.offset, EMPTY)
    texts = record.values[: len(names)]
    for name, text in zip(names, texts, strict=True):
        if isinstance(text, int):
            return failed("not_text", record.source, record.offset, f"the {name} is the number {text}, not text")
    written = tuple(str(text or "") for text in texts)
    for name, text in zip(names, written, strict=True):
        if not text.strip():
            return _rejected(written, record.source, record.offset, f"empty_{name}")
    return written


def _rejected(texts: tuple[str, ...], source: str, offset: int, reason: str) -> Rejected:
    return Rejected("\n".join(map(normalise, texts)), source, offset, reason)
