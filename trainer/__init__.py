"""Shards to a trained encoder, on Ray Train."""

if __name__ != "declutr.trainer":
    raise ImportError("import declutr.trainer, not trainer")
