"""Exploration of an encoder in a browser: nearest texts of a sentence, and a map of an index."""
