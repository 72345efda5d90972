"""The driver's process: checks before a run, supervision of the worker group, and the export."""
