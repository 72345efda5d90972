"""SentEval: its tasks, its protocols, its classifiers."""
