"""Exchanges between workers, and parameters sharded over workers."""
