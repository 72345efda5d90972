"""Descriptions of shards, documents, runs and checkpoints for `declutr inspect`, `why`, `checkpoints` and `report`."""

if __name__ != "declutr.inspection":
    raise ImportError("import declutr.inspection, not inspection")
