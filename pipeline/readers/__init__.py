"""Readers: generators of documents and failures. Nothing in the data stops them; what fails is a record.

Everything is a stream with bounded memory: nothing is extracted, no size that a header claims is believed.
"""

from pipeline.readers.corpus import Record

__all__ = ["Record"]
