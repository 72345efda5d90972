"""Measurements that anyone can rerun; a folder has those of one question."""
