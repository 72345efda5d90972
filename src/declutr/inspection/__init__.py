"""Descriptions of shards, documents, runs and checkpoints for `declutr inspect`, `why`, `checkpoints` and `report`."""
