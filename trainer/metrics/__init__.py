"""Metrics of a run as JSON lines and TensorBoard events."""
