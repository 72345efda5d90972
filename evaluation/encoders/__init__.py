"""Kinds of sentence encoders; `evaluation.encoders.loading.load_encoder` chooses among them by name."""
