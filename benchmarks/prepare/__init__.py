"""Throughput of preparation, on one host and on several."""
