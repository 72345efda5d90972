"""Download of SentEval's data from the addresses that still serve them."""
