"""Use and evaluation of encoders: embeddings, indexes, scores and reports."""
