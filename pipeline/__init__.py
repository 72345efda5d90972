"""Preparation of a corpus on Ray Data: read, normalise, tokenize, keep or drop, write shards. Never imports torch."""

if __name__ != "declutr.pipeline":
    raise ImportError("import declutr.pipeline, not pipeline")
