"""Kinds of sentence encoders; `evaluation.encoder.load_encoder` chooses among them by name."""
