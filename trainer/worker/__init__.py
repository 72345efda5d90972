"""A worker's process: the training loop, its heartbeat, and its listener for stop notices."""
