"""Effect of training on the quality of embeddings."""
