"""Exact and near-duplicate removal that scales out: signatures in the unit's task, pairs by bucket, one decision.

1. While a unit is prepared, `write_keys` puts one file of keys beside its shards (`keys.py`, `signatures.py`).
2. `find_duplicates` (`search.py`) cuts the space of keys into buckets, a Ray Data task each, which writes the pairs of
   documents in it that are verified to be alike (`pairs.py`); then decides which document of each cluster stays
   (`clusters.py`) and writes `duplicates.arrow` (`table.py`).
3. `removed` names what is to be left out of a unit.

Nothing depends on the number of workers or on the order in which they finish: docs/decisions/0010-duplicates.md.
"""
