"""Measurements that anyone can rerun: no corpus, no download, no Ray."""
