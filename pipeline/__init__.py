"""Preparation of a corpus on Ray Data: read, normalise, tokenize, keep or drop, write shards. Never imports torch."""
