"""Kinds of sentence encoders; `evaluation.encoders.loading.load_encoder` chooses by name."""
