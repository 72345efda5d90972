"""The order of the training data and its way to a rank: plan, chunks, stream, packed batches."""
