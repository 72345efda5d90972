"""Corpus to shards, on Ray Data: read, normalise, tokenize, keep or drop, write. Never imports torch."""
