"""Time and memory of a training step, and the throughput of its collator."""
