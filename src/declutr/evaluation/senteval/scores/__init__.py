"""Scores of a task from the embeddings of its sentences."""
