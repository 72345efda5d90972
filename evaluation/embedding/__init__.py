"""Embedding of text files, indexes of the embeddings, and export to ONNX."""
