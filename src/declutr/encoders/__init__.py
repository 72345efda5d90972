"""Kinds of sentence encoders; `declutr.evaluation.encoders.loading.load_encoder` chooses by name."""
