"""Checkpoints of a run: their files, the thread that writes them, which are kept, copies in object stores."""
