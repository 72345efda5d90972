"""Needs of runs that are too large for this machine."""
