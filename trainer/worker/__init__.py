"""A worker's process: the training loop, its heartbeat, and notices from the driver."""
