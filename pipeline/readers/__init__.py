"""Readers: generators of documents and failures. Bad data never stops a reader; it gives a failure record.

All data are streams with bounded memory: nothing is extracted to disk, and sizes in headers are not trusted.
"""
