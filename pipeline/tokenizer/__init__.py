"""Tokenizers: training, loading, and fast engines that give the same ids."""
