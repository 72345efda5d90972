"""Faults, grouped by the part of a run that they hit."""
