"""Evaluation of an encoder: from sentences to result files, resumable after a kill."""
