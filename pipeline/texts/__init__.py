"""Rows of short texts: sentences, premises with their hypotheses, triples."""
