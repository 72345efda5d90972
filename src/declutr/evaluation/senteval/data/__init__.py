"""SentEval's tasks and the files that hold their data."""
