"""Speed and equality of embedding and of SentEval."""
