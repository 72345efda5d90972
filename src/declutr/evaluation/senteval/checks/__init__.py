"""Checks of SentEval's data against the published rows."""
