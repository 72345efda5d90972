"""The driver's process: checks before a run, the worker group and its supervision, the export."""
