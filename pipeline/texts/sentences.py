"""Splitting of documents into sentences by `sentencex`, a rule-based segmenter of the Wikimedia Foundation."""

from collections.abc import Iterator

from declutr.pipeline.readers.corpus import Document, ReadFailure, Record

_WINDOW_CHARACTERS = 1 << 14
"""Characters that are split at a time: with some scripts the segmenter's time grows with the square of its input."""


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
        starts = [found["start_index"] for found in get_sentence_boundaries(language, window)]
        if start + len(window) < len(text) and len(starts) > 1:
            window = window[: starts.pop()]  # the last sentence may continue after the window
        for first, stop in zip([0, *starts[1:]], [*starts[1:], len(window)], strict=True):
            if sentence := window[first:stop].strip():
                yield sentence
        start += len(window)
