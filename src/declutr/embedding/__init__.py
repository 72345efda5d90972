"""Embedding of text files, and indexes of the embeddings."""
