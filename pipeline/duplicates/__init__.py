"""Removal of exact and near duplicates, in three steps that scale out.

1. The task that prepares a unit also writes one file of keys with `write_keys` (`keys.py`, `shingles.py`).
2. `find_duplicates` (`search.py`) divides the space of keys into buckets, one Ray Data task each, which returns the
   verified pairs of similar documents. It then decides which document of each cluster stays and writes
   `duplicates.arrow` (`pairs.py`).
3. `removed` lists the documents to leave out of a unit.

The result does not depend on the number of workers or on their order: docs/decisions/0008-duplicates.md.
"""
