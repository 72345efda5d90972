"""Sentence encoders from long documents without labels, on Ray."""
