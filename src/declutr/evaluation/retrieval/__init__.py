"""Retrieval with the user's own pairs: reading, lexical baselines, measures and comparisons."""
