"""One optimizer step: microbatches, gradient caching, update."""
