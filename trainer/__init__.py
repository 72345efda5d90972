"""Shards to a trained encoder, on Ray Train."""
