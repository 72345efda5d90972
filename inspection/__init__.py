"""Descriptions of shards, documents, runs and checkpoints for `declutr inspect` and `declutr checkpoints`."""

if __name__ != "declutr.inspection":
    raise ImportError("import declutr.inspection, not inspection")
