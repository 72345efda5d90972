"""The configuration of a run, and its parts built from it."""
