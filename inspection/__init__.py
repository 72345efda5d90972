"""Descriptions of shards, documents, runs and checkpoints for `declutr inspect` and `declutr checkpoints`."""
