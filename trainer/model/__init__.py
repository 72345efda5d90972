"""The encoder: a masked language model over packed or padded spans."""
