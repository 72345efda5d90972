"""The tasks of SentEval and the files that hold their data."""
