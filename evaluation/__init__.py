"""Checkpoints to embeddings, scores and words; and the one console command over everything."""
