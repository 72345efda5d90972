"""Rows of a corpus, made from the records of its readers according to the `content` section of `prepare`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from declutr.pipeline.readers.corpus import Document, ReadFailure, Record, Rejected, document_id
from declutr.pipeline.shards.content import AnyContent, PairsContent, SentencesContent, TriplesContent


@dataclass(frozen=True, slots=True)
class TextRow(Document):
    """A premise and its hypotheses; `text` joins them by newlines, for the rules that look at one text."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    """Label of each text; NO_LABEL for the premise."""


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
    return document_id(json.dumps([texts, labels], ensure_ascii=False).encode())


def rows(records: Iterator[Record], content: AnyContent) -> Iterator[Record]:
    """The rows of a corpus, and the failures of its readers.

    Raises:
        OSError: the pairs of one file are too large.
    """
    # Imported here because these modules build the rows defined above.
    from declutr.pipeline.texts.pairs import pair_rows, triple_rows
    from declutr.pipeline.texts.sentences import split_documents

    match content:
        case SentencesContent(split=True, language=language):
            return split_documents(records, language)
        case PairsContent():
            return pair_rows(records, content.required_labels)
        case TriplesContent():
            return triple_rows(records)
        case _:
            return records
