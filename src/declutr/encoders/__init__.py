"""Kinds of sentence encoders; `declutr.encoders.loading.load_encoder` chooses by name."""
